"""Whether a backend can run a recipe: the capability questions that a recipe raises."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from te_hal.dispatch import (
    ANY_DEVICE,
    ask_backend,
    ask_declared,
    backend_for,
    current_memo,
    forced_backend,
    parts_of,
    support_for,
)
from te_hal.quantization.linear_calls import cast_call, dequantize_call, gemm_call, linear_copies, operand_kind
from te_hal.quantization.operand_formats import recipe_formats
from te_hal.recipe import CustomRecipe, DelayedScaling
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.support import SUPPORTED, Call, Support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.dispatch import Backend
    from te_hal.quantization.linear_calls import Copies
    from te_hal.quantization.operand_formats import OperandFormat
    from te_hal.recipe import Recipe
    from te_hal.schema.support import Kind

#: Activation dtypes, the usual one first: its answer is the one that a refusal shows.
_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def recipe_support(recipe: Recipe, backend: Backend, device: torch.device, *, declared: bool = False) -> Support:
    """A backend's first no to a cast, gemm or update of the recipe, or yes. No other backend is asked.

    Args:
        recipe: what to run.
        backend: who is asked, first whether it is usable.
        device: where the tensors are.
        declared: leave that first question out: what the backend declares on any machine.

    A CustomRecipe is always answered yes: what its factory wants is asked for when a module runs.

    Returns:
        Yes where some activation dtype works; else the answer for bf16.
    """
    if isinstance(recipe, CustomRecipe):
        return SUPPORTED
    ask = partial(_ask_whole, partial(ask_declared if declared else ask_backend, backend))
    return _first_no(recipe, backend, device, ask, backward=True)


def _ask_whole(ask: Callable[[Call], Support], call: Call) -> Support:
    """The answer for a call, or for the calls that it is composed of where its op is optional."""
    answer = ask(call)
    parts = None if answer else parts_of(call)
    if parts is None:
        return answer
    return next((no for no in (_ask_whole(ask, part) for part in parts) if not no), SUPPORTED)


def check_forced_backend(recipe: Recipe) -> None:
    """Refuse a recipe that the forced backend lacks; without a forced one, modules ask at their first op.

    What the policy sends or lets fall back to another backend is that one's to answer. Backward is asked about where
    gradients are on.

    Raises:
        UnsupportedError: with the backend's own sentence.
        BackendNotFoundError, BackendUnavailableError: no backend can be chosen for the forced one's device.
    """
    if isinstance(recipe, CustomRecipe):
        return
    memo, backward = current_memo(), torch.is_grad_enabled()
    if _accepted.holds(memo, recipe, backward=backward):
        return
    forced = forced_backend()
    if forced is not None:
        _ask_forced(recipe, forced, backward=backward)
    _accepted.add(memo, recipe, backward=backward)


def _ask_forced(recipe: Recipe, forced: Backend, *, backward: bool) -> None:
    device = torch.device("cpu") if ANY_DEVICE in forced.serves else torch.device(min(forced.serves))
    backend = backend_for(device, "gemm")
    answer = _first_no(recipe, backend, device, support_for, backward=backward)
    if not answer:
        raise UnsupportedError(
            f"autocast: recipe {type(recipe).__name__} on backend {backend.name!r}",
            got=answer.sentence,
            accepted="a recipe that the backend has",
            todo="choose another recipe or backend (te_hal.list_backends())",
        )


class _Accepted:
    """What has been answered yes under the selection in force; autocast asks at every entry.

    The latest recipe is known by itself, others by what their calls depend on.
    """

    def __init__(self) -> None:
        self._latest: tuple[object, Recipe | None, int, bool] = (None, None, 0, False)
        self._memo: object = None
        self._questions: set[tuple[object, ...]] = set()

    def holds(self, memo: object, recipe: Recipe, *, backward: bool) -> bool:
        """Whether the recipe has had its yes under the selection that ``memo`` stands for."""
        known, latest, version, with_backward = self._latest
        if known is memo and latest is recipe and version == recipe.version and with_backward is backward:
            return True
        if self._memo is not memo or _question(recipe, backward=backward) not in self._questions:
            return False
        self._latest = (memo, recipe, recipe.version, backward)
        return True

    def add(self, memo: object, recipe: Recipe, *, backward: bool) -> None:
        """Remember a yes until the selection changes; ``memo`` is the one from before the question."""
        if self._memo is not memo:
            self._memo, self._questions = memo, set()
        self._questions.add(_question(recipe, backward=backward))
        self._latest = (memo, recipe, recipe.version, backward)


_accepted = _Accepted()


def _question(recipe: Recipe, *, backward: bool) -> tuple[object, ...]:
    """Everything about a recipe that its calls depend on."""
    algo = recipe.amax_compute_algo if isinstance(recipe, DelayedScaling) and recipe.updates_by_op else None
    return (type(recipe), recipe_formats(recipe), algo, backward)


def _first_no(
    recipe: Recipe, backend: Backend, device: torch.device, ask: Callable[[Call], Support], *, backward: bool
) -> Support:
    """Yes where all calls in one activation dtype are answered yes; else the first no in the usual dtype."""

    def answer(dtype: torch.dtype) -> Support:
        calls = _recipe_calls(recipe, backend, device, dtype, backward=backward)
        return next((no for no in map(ask, calls) if not no), SUPPORTED)

    answers = map(answer, _ACTIVATIONS)
    first = next(answers)
    return SUPPORTED if first or any(answers) else first


def _recipe_calls(
    recipe: Recipe, backend: Backend, device: torch.device, dtype: torch.dtype, *, backward: bool
) -> Iterator[Call]:
    """The calls of a linear layer without bias in one activation dtype, and the update of its scales."""
    formats, order = recipe_formats(recipe), backend.columnwise_order
    copies = linear_copies(backend.gemm_copies, formats, dgrad=backward, wgrad=backward)

    def kind(layout: str, role: str, wanted: Copies) -> Kind:
        return operand_kind(formats.read_by(layout, role), wanted, order, dtype)

    made = {"input": copies.input_made, "weight": copies.weight_made, "grad_output": copies.grad_made}
    for role in ("input", "weight", *["grad_output"] * backward):
        of: OperandFormat | None = getattr(formats, role)
        if of is not None:
            yield cast_call(device, dtype, of.kind(made[role], order), delayed=of.delayed)
    a, b = kind("fprop", "input", made["input"]), kind("fprop", "weight", made["weight"])
    yield gemm_call("fprop", device, a, b, dtype)
    if backward:
        if formats.backward_override == "dequantized":
            for of, kept in ((formats.weight, copies.weight_kept), (formats.input, copies.input_kept)):
                if of is not None:
                    yield dequantize_call(device, of, kept, order, dtype)
        gradient = kind("dgrad", "grad_output", made["grad_output"])
        yield gemm_call("dgrad", device, gradient, kind("dgrad", "weight", copies.weight_kept), dtype)
        yield gemm_call("wgrad", device, gradient, kind("wgrad", "input", copies.input_kept), dtype)
    if backward and isinstance(recipe, DelayedScaling) and recipe.updates_by_op:
        kinds = {"amax_history": torch.float32, "scale": torch.float32, "reduced_amax": None}
        yield Call("update_delayed_scale", device, kinds, {"amax_compute_algo": recipe.amax_compute_algo})
