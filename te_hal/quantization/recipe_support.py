"""Whether a backend can run a recipe: the capability questions that a recipe raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import ANY_DEVICE, backend_for, forced_backend, support_for
from te_hal.recipe import DelayedScaling
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import SUPPORTED, Call, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from te_hal.dispatch import Backend
    from te_hal.recipe import Recipe
    from te_hal.schema.formats import ElementFormat
    from te_hal.schema.support import Kind

#: Activation dtypes, the usual one first: its answer is the one that a refusal shows.
_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def recipe_support(recipe: Recipe, backend: Backend, device: torch.device) -> Support:
    """A backend's first no to a cast, gemm or update of the recipe, or yes. No other backend is asked.

    Args:
        recipe: what to run.
        backend: who is asked.
        device: where the tensors are.

    Returns:
        Yes where some activation dtype works; else the answer for bf16.
    """

    def ask(call: Call) -> Support:
        if call.op not in backend.kernels:
            return Support.no(Code.NO_KERNEL, f"has no kernel for {call.op}")
        return backend.supports(call)

    return _first_no(_Calls(recipe, backend, device), ask, _ACTIVATIONS)


def check_recipe(where: str, recipe: Recipe, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Refuse a recipe that the selection in force cannot run, fallbacks of the policy included.

    Args:
        where: who asks, for the message.
        recipe: what to run.
        device: where the tensors are.
        dtype: activation dtype; None: any one that works will do.

    Raises:
        UnsupportedError: with the backend's own sentence.
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for this device.
    """
    backend = backend_for(device, "gemm")
    answer = _first_no(_Calls(recipe, backend, device), support_for, _ACTIVATIONS if dtype is None else (dtype,))
    if not answer:
        raise UnsupportedError(
            f"{where}: recipe {type(recipe).__name__} on backend {backend.name!r}",
            got=answer.sentence,
            accepted="a recipe that the backend has",
            todo="choose another recipe or backend (te_hal.list_backends())",
        )


def check_forced_backend(recipe: Recipe) -> None:
    """Refuse a recipe that the forced backend lacks; without a forced one, modules ask at their first op.

    Raises:
        UnsupportedError: with the backend's own sentence.
    """
    backend = forced_backend()
    if backend is not None:
        device = torch.device("cpu") if ANY_DEVICE in backend.serves else torch.device(min(backend.serves))
        check_recipe("autocast", recipe, device)


def _first_no(calls: _Calls, ask: Callable[[Call], Support], dtypes: Iterable[torch.dtype]) -> Support:
    """Yes where all calls in one of the dtypes are answered yes; else the first no in the first dtype."""
    answers = (next((no for no in map(ask, calls.all(dtype)) if not no), SUPPORTED) for dtype in dtypes)
    first = next(answers)
    return SUPPORTED if first or any(answers) else first


class _Calls:
    """The op calls that one linear layer makes under a recipe, forward and backward."""

    def __init__(self, recipe: Recipe, backend: Backend, device: torch.device) -> None:
        self.recipe, self.device, self.order = recipe, device, backend.columnwise_order
        self.forward, self.backward = (recipe.element_format(forward=forward) for forward in (True, False))
        mode = recipe.scaling_mode
        self.fprop = backend.gemm_copies("fprop", self.forward, mode)
        self.dgrad = backend.gemm_copies("dgrad", self.backward, mode)
        self.wgrad = backend.gemm_copies("wgrad", self.backward, mode)

    def all(self, dtype: torch.dtype) -> Iterator[Call]:
        """Every call in this activation dtype."""
        yield from self._casts(dtype)
        yield from self._gemms(dtype)
        yield from self._updates()

    def _casts(self, dtype: torch.dtype) -> Iterator[Call]:
        delayed = self.recipe.delayed()
        for kind in (self._input(), self._weight(), self._grad_output()):
            kinds: dict[str, Kind] = {
                "input": dtype,
                "scale": torch.float32,
                "amax": torch.float32 if delayed else None,
                "out": None,
            }
            flags = {
                "dtype": kind.format.dtype,
                "mode": kind.mode,
                "rowwise": kind.rowwise,
                "columnwise": kind.columnwise,
                "columnwise_order": kind.order,
            }
            yield Call("quantize", self.device, kinds, flags)
        if not delayed:
            yield Call("amax", self.device, {"input": dtype, "out": None}, {})
            yield Call("compute_scale", self.device, {"amax": torch.float32}, {})

    def _gemms(self, dtype: torch.dtype) -> Iterator[Call]:
        grad = self._grad_output()
        for layout, a, b in (
            ("fprop", self._input(), self._weight()),
            ("dgrad", grad, self._kind(self.forward, [self.dgrad.b])),
            ("wgrad", grad, self._kind(self.forward, [self.wgrad.b])),
        ):
            flags = {"layout": layout, "accumulate": False, "out_dtype": dtype}
            yield Call("gemm", self.device, {"a": a, "b": b, "bias": None, "out": None}, flags)

    def _updates(self) -> Iterator[Call]:
        recipe = self.recipe
        if isinstance(recipe, DelayedScaling) and recipe.updates_by_op:
            kinds = {"amax_history": torch.float32, "scale": torch.float32, "reduced_amax": None}
            yield Call("update_delayed_scale", self.device, kinds, {"amax_compute_algo": recipe.amax_compute_algo})

    def _input(self) -> StorageKind:
        return self._kind(self.forward, [self.fprop.a, self.wgrad.b])

    def _weight(self) -> StorageKind:
        return self._kind(self.forward, [self.fprop.b, self.dgrad.b])

    def _grad_output(self) -> StorageKind:
        return self._kind(self.backward, [self.dgrad.a, self.wgrad.a])

    def _kind(self, fmt: ElementFormat, copies: Iterable[str]) -> StorageKind:
        read = set(copies)
        return StorageKind.of(
            fmt,
            self.recipe.scaling_mode,
            rowwise="rowwise" in read,
            columnwise="columnwise" in read,
            order=self.order,
        )
