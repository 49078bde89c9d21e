"""Weight gradients that a backward leaves out and ``backward_dw()`` computes later (delay_wgrad_compute).

A pipeline runs the gradient of the input first, which the stage before waits for, and fills its gaps with weight
gradients. The backward keeps both operands of the product that it leaves out; the oldest comes first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.schema.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Left(NamedTuple):
    """One product: what computes it, and plain operands that must stay as they are, with their versions."""

    compute: Callable[[], torch.Tensor | None]
    operands: tuple[tuple[torch.Tensor, int], ...]


class DelayedWgrads:
    """Weight gradients of one product of a module that wait, oldest first."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[_Left] = deque()

    def __reduce__(self) -> tuple[type[DelayedWgrads], tuple[()]]:
        """A copied or pickled module has nothing to compute."""
        return DelayedWgrads, ()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, compute: Callable[[], torch.Tensor | None], *operands: object) -> None:
        """Have a gradient computed later.

        Args:
            compute: gives the gradient, or None where main_grad got it.
            operands: what it reads; a plain tensor among them must not be written to before.
        """
        plain = [operand for operand in operands if isinstance(operand, torch.Tensor) and not operand.is_inference()]
        versions = tuple((operand, operand._version) for operand in plain)  # noqa: SLF001 - autograd's own, no public name
        self._waiting.append(_Left(compute, versions))

    def compute_oldest(self, where: str) -> torch.Tensor | None:
        """The gradient that has waited longest; None where main_grad got it.

        Raises:
            StateError: an operand was written to since its backward. The gradient waits on.
        """
        left = self._waiting[0]
        if any(operand._version != version for operand, version in left.operands):  # noqa: SLF001 - as above
            raise StateError(
                f"{where}: backward_dw",
                got="an input or output gradient that was written to in place since its backward",
                accepted="one that stays as it is until backward_dw",
                todo="call backward_dw before, or write into a copy",
            )
        gradient = left.compute()
        self._waiting.popleft()
        return gradient


class Target(NamedTuple):
    """Where a product's weight gradient goes.

    Attributes:
        names: of the parameters, whose rows follow one another.
        product: its number in a stacked parameter; None: the parameters are its own.
    """

    names: tuple[str, ...]
    product: int | None = None


class DelaysWgrad:
    """What modules offer that can leave weight gradients to a later call."""

    delay_wgrad_compute = False
    _delayed: tuple[DelayedWgrads, ...] = ()
    _targets: tuple[Target, ...] = ()
    _after_wgrad: tuple[Callable[[], Any], ...] = ()

    def delay_wgrads(self, targets: Sequence[Target]) -> None:
        """Leave out the weight gradients of every backward from now on.

        Args:
            targets: by product.
        """
        self.delay_wgrad_compute = True
        self._delayed = tuple(DelayedWgrads() for _ in targets)
        self._targets = tuple(targets)
        for target in targets:
            for name in target.names:
                getattr(self, name).skip_backward_post_hook = True  # as in Transformer Engine, for frameworks

    def need_backward_dw(self) -> bool:
        """Whether the module was made with ``delay_wgrad_compute``, so that :meth:`backward_dw` has work to do."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward that left them out.

        In place: they are added to the weights' ``.grad``, or go into ``main_grad`` by the rules of a fused backward.
        Biases got theirs in the backward. Then the hooks of :meth:`register_wgrad_accumulation_and_reduce_hooks` run.
        Without ``delay_wgrad_compute`` nothing happens, nor where every weight is frozen, so that no backward waits.

        Raises:
            StateError: no backward waits for a weight that needs a gradient; an operand was written to since; a
                ``main_grad`` is gone or does not fit.
        """
        if not self.delay_wgrad_compute:
            return
        label = str(getattr(self, "label", type(self).__name__))
        if not any(self._delayed):
            if not any(getattr(self, name).requires_grad for target in self._targets for name in target.names):
                return
            raise StateError(
                f"{label}: backward_dw",
                got="a call with no backward that waits",
                accepted="one call after each backward that reached this module",
                todo="call it once per backward",
            )
        with torch.no_grad():
            for delayed, target in reversed([*zip(self._delayed, self._targets, strict=True)]):
                gradient = delayed.compute_oldest(label) if delayed else None
                if gradient is not None:
                    self._add(gradient, target)
        for hook in self._after_wgrad:
            hook()

    def _add(self, gradient: torch.Tensor, target: Target) -> None:
        start = 0
        for name in target.names:
            parameter: torch.Tensor = getattr(self, name)
            rows = parameter.shape[0] if target.product is None else parameter.shape[1]
            part, start = gradient[start : start + rows], start + rows
            if not parameter.requires_grad:
                continue
            if target.product is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad[target.product].add_(part)
            elif parameter.grad is None:
                parameter.grad = part.to(parameter.dtype)
            else:
                parameter.grad.add_(part)

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: object) -> None:
        """Have a function called, without arguments, at the end of every :meth:`backward_dw`.

        Raises:
            ArgumentError: no function.
        """
        hook = wgrad_accumulation_and_reduce_hook
        if not callable(hook):
            label = getattr(self, "label", type(self).__name__)
            raise ArgumentError(
                f"{label}: register_wgrad_accumulation_and_reduce_hooks",
                got=repr(hook),
                accepted="a function without arguments",
                todo="pass the framework's hook",
            )
        self._after_wgrad = (*self._after_wgrad, hook)
