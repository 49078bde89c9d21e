"""Whether a backend can run a recipe: the capability questions that a recipe raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import ANY_DEVICE, backend_for, current_memo, forced_backend, support_for
from te_hal.recipe import DelayedScaling
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import SUPPORTED, Call, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

    return _first_no(_Calls(recipe, backend, device, backward=True), ask)


def check_forced_backend(recipe: Recipe) -> None:
    """Refuse a recipe that the forced backend lacks; without a forced one, modules ask at their first op.

    What the policy sends or lets fall back to another backend is that one's to answer. Backward is asked about where
    gradients are on.

    Raises:
        UnsupportedError: with the backend's own sentence.
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for the forced one's device.
    """
    memo, question = current_memo(), _question(recipe, backward=torch.is_grad_enabled())
    if _accepted.holds(memo, question):
        return
    forced = forced_backend()
    if forced is None:
        return
    device = torch.device("cpu") if ANY_DEVICE in forced.serves else torch.device(min(forced.serves))
    backend = backend_for(device, "gemm")
    answer = _first_no(_Calls(recipe, backend, device, backward=torch.is_grad_enabled()), support_for)
    if not answer:
        raise UnsupportedError(
            f"autocast: recipe {type(recipe).__name__} on backend {backend.name!r}",
            got=answer.sentence,
            accepted="a recipe that the backend has",
            todo="choose another recipe or backend (te_hal.list_backends())",
        )
    _accepted.add(memo, question)


class _Accepted:
    """What forced backends have said yes to, under the selection in force; autocast asks at every entry."""

    def __init__(self) -> None:
        self._memo: object = None
        self._questions: set[tuple[object, ...]] = set()

    def holds(self, memo: object, question: tuple[object, ...]) -> bool:
        """Whether this question has had its yes under the selection that ``memo`` stands for."""
        return self._memo is memo and question in self._questions

    def add(self, memo: object, question: tuple[object, ...]) -> None:
        """Remember a yes until the selection changes; ``memo`` is the one from before the question."""
        if self._memo is not memo:
            self._memo, self._questions = memo, set()
        self._questions.add(question)


_accepted = _Accepted()


def _question(recipe: Recipe, *, backward: bool) -> tuple[object, ...]:
    """Everything about a recipe that its calls depend on."""
    formats = [recipe.element_format(forward=forward).name for forward in (True, False)]
    algo = recipe.amax_compute_algo if isinstance(recipe, DelayedScaling) and recipe.updates_by_op else None
    return (type(recipe), recipe.scaling_mode, *formats, algo, backward)


def _first_no(calls: _Calls, ask: Callable[[Call], Support]) -> Support:
    """Yes where all calls in one activation dtype are answered yes; else the first no in the usual dtype."""
    answers = (next((no for no in map(ask, calls.all(dtype)) if not no), SUPPORTED) for dtype in _ACTIVATIONS)
    first = next(answers)
    return SUPPORTED if first or any(answers) else first


class _Calls:
    """The op calls that one linear layer makes under a recipe.

    Args:
        recipe: the recipe.
        backend: whose gemm runs; it says which copies that reads.
        device: of the tensors.
        backward: whether both gradients are wanted.
    """

    def __init__(self, recipe: Recipe, backend: Backend, device: torch.device, *, backward: bool) -> None:
        self.recipe, self.device, self.with_backward = recipe, device, backward
        self.order = backend.columnwise_order
        self.forward, self.backward = (recipe.element_format(forward=forward) for forward in (True, False))
        mode = recipe.scaling_mode
        fprop = backend.gemm_copies("fprop", self.forward, mode)
        dgrad = backend.gemm_copies("dgrad", self.backward, mode)
        wgrad = backend.gemm_copies("wgrad", self.backward, mode)
        self.input = self._kind(self.forward, fprop.a, wgrad.b if backward else fprop.a)
        self.weight = self._kind(self.forward, fprop.b, dgrad.b if backward else fprop.b)
        self.grad_output = self._kind(self.backward, dgrad.a, wgrad.a)
        self.kept_input = self._kind(self.forward, wgrad.b)
        self.kept_weight = self._kind(self.forward, dgrad.b)

    def all(self, dtype: torch.dtype) -> Iterator[Call]:
        """Every call in this activation dtype."""
        yield from self._casts(dtype)
        yield from self._gemms(dtype)
        yield from self._updates()

    def _casts(self, dtype: torch.dtype) -> Iterator[Call]:
        amax = torch.float32 if self.recipe.delayed() else None
        for kind in (self.input, self.weight, *[self.grad_output] * self.with_backward):
            kinds: dict[str, Kind] = {"input": dtype, "scale": torch.float32, "amax": amax, "out": None}
            flags = {
                "dtype": kind.format.dtype,
                "mode": kind.mode,
                "rowwise": kind.rowwise,
                "columnwise": kind.columnwise,
                "columnwise_order": kind.order,
            }
            yield Call("quantize", self.device, kinds, flags)
        if amax is None:
            yield Call("amax", self.device, {"input": dtype, "out": None}, {})
            yield Call("compute_scale", self.device, {"amax": torch.float32}, {})

    def _gemms(self, dtype: torch.dtype) -> Iterator[Call]:
        operands = [("fprop", self.input, self.weight)]
        if self.with_backward:
            operands += [
                ("dgrad", self.grad_output, self.kept_weight),
                ("wgrad", self.grad_output, self.kept_input),
            ]
        for layout, a, b in operands:
            flags = {"layout": layout, "accumulate": False, "out_dtype": dtype}
            yield Call("gemm", self.device, {"a": a, "b": b, "bias": None, "out": None}, flags)

    def _updates(self) -> Iterator[Call]:
        recipe = self.recipe
        if self.with_backward and isinstance(recipe, DelayedScaling) and recipe.updates_by_op:
            kinds = {"amax_history": torch.float32, "scale": torch.float32, "reduced_amax": None}
            yield Call("update_delayed_scale", self.device, kinds, {"amax_compute_algo": recipe.amax_compute_algo})

    def _kind(self, fmt: ElementFormat, *copies: str) -> StorageKind:
        return StorageKind.of(
            fmt,
            self.recipe.scaling_mode,
            rowwise="rowwise" in copies,
            columnwise="columnwise" in copies,
            order=self.order,
        )
