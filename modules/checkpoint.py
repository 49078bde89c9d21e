"""te.checkpoint: torch's activation recompute under Transformer Engine's arguments."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_hal.modules.arguments import REASONS
from te_hal.modules.rng_tracker import RNGStatesTracker
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

_REFUSED = declare(
    "checkpoint",
    {"distribute_saved_activations": False, "tp_group": None},
    {
        "distribute_saved_activations": "it splits what is kept over processes of tensor parallelism; there are none",
        "tp_group": REASONS["tp_group"],
    },
)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - the function's
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: object = None,
    use_reentrant: bool = True,
    **kwargs: Any,  # noqa: ANN401 - the function's, and torch's
) -> Any:  # noqa: ANN401 - the function's
    """Call a function without keeping what its backward reads, and call it again in the backward.

    Losses, gradients, scaling states and random streams are bit for bit those without it, whatever the recipe, also
    where several forwards come before the first backward (docs/recompute.md). ``torch.utils.checkpoint.checkpoint``
    does the same; this adds Transformer Engine's defaults and ``get_rng_state_tracker``.

    Args:
        function: what is called. The second call must do what the first did.
        *args: its arguments; kept for the backward.
        distribute_saved_activations: True is refused: it belongs to tensor parallelism.
        get_rng_state_tracker: gives a tracker that the function draws from by other ways than te_hal's modules and
            ``te.RNGStatesTracker.fork``, which need no such help; its states are restored for the second call.
        tp_group: a group is refused, as above.
        use_reentrant: by an autograd function that runs a backward in the backward, else by hooks for saved tensors,
            which may be asked of a part of the graph, and stop where nothing more is needed.
        **kwargs: ``context_fn``, ``determinism_check``, ``debug`` as torch has them, without reentrance only; the
            rest are the function's.

    Returns:
        What the function gave.

    Raises:
        ArgumentTypeError: no function.
        ArgumentError: a flag that is no bool; with reentrance, a keyword argument that needs a gradient, or a list,
            tuple or dict with one where no positional argument does; what gives no tracker.
        UnsupportedError: an argument of a later feature; with reentrance, a result that is a parameter, that was
            computed outside, or that is a list or dict of tensors.
    """
    where = "te.checkpoint"
    given = {"distribute_saved_activations": distribute_saved_activations, "tp_group": tp_group}
    refuse(where, given, _REFUSED)
    check_flags(where, {"use_reentrant": use_reentrant})
    if not callable(function):
        raise ArgumentTypeError(
            f"{where}: function", got=repr(function), accepted="a function or module", todo="pass what is to be called"
        )
    if get_rng_state_tracker is not None:
        function = _with_states(function, _tracker(where, get_rng_state_tracker))
    if not use_reentrant:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    of_torch = {name: kwargs.pop(name) for name in ("context_fn", "determinism_check", "debug") if name in kwargs}
    _refuse_hidden(where, args, kwargs)
    bound = functools.partial(function, **kwargs) if kwargs else function
    return torch_checkpoint(_checked(where, bound), *args, use_reentrant=True, **of_torch)


def _refuse_hidden(where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """With reentrance autograd sees the tensors among positional arguments alone, and no other asks for a gradient."""
    if not torch.is_grad_enabled():
        return
    seen = any(_needs_gradient(arg) for arg in args)
    inside = [] if seen else [(f"argument {place}", arg) for place, arg in enumerate(args)]
    for name, value in (*inside, *kwargs.items()):
        direct = _needs_gradient(value)
        if direct or (not seen and any(map(_needs_gradient, pytree.tree_leaves(value)))):
            raise ArgumentError(
                f"{where}: {name}",
                got=f"{'a keyword argument' if direct else f'a {type(value).__name__} with a tensor'} that needs a "
                "gradient, with use_reentrant=True",
                accepted="it as a positional argument",
                todo="pass it by position, or use_reentrant=False",
            )


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _checked(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, refused where autograd's function around it would lose a gradient, or not end.

    Autograd would make a result of the checkpoint out of a tensor that was there before: a parameter would be none any
    more, what computed another would be forgotten, and the backward, which meets it again in the second call, would not
    end. Tensors inside of a list would get no history at all.
    """
    wanted = torch.is_grad_enabled()

    def checked(*args: Any) -> Any:  # noqa: ANN401 - the function's
        first, mark = not torch.is_grad_enabled(), _newest()
        given = function(*args)
        for place, result in enumerate(given if isinstance(given, tuple) else (given,)):
            if wanted and _holds_tensors(result):
                _refuse(where, f"result {place} is a {type(result).__name__} of tensors, which would get no gradient")
            if any(result is arg for arg in args):
                continue
            if _is_parameter(result):
                _refuse(
                    where,
                    f"result {place} is a parameter (shape {list(result.shape)}), as a layer with return_bias=True "
                    "gives its bias",
                )
            if first and _was_there(result, mark):
                _refuse(where, f"result {place} was computed outside of it (shape {list(result.shape)})")
        return given

    return checked


def _refuse(where: str, what: str) -> None:
    raise UnsupportedError(
        where,
        got=f"a function whose {what}, with use_reentrant=True",
        accepted="tensors that the function computes, and its arguments, in no list or dict",
        todo="pass use_reentrant=False, or take from outside what was made there",
    )


def _newest() -> int:
    """The number of a node that autograd makes now: in one thread they count up."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        node = torch.empty(0, device="cpu", requires_grad=True).view(0).grad_fn
    return int(node._sequence_nr())  # type: ignore[union-attr] # noqa: SLF001 - made one; torch offers no other name


def _was_there(result: object, mark: int) -> bool:
    """Whether a tensor's history is older than a mark; one that the function made has none, or its own."""
    node = result.grad_fn if isinstance(result, torch.Tensor) else None
    return node is not None and node._sequence_nr() < mark  # noqa: SLF001 - as above


def _holds_tensors(result: object) -> bool:
    inside = [] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
    return any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in inside)


def _is_parameter(result: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a leaf that needs a gradient; a view that the function took of one is none."""
    if not (isinstance(result, torch.Tensor) and result.requires_grad and result.is_leaf):
        return False
    base = result._base  # noqa: SLF001 - torch's documentation names it; without gradients a view of a leaf is a leaf
    return base is None or not base.requires_grad


def _tracker(where: str, get_tracker: Callable[[], Any]) -> Any:  # noqa: ANN401 - of any make
    tracker = get_tracker() if callable(get_tracker) else None
    if not all(callable(getattr(tracker, name, None)) for name in ("get_states", "set_states")):
        raise ArgumentError(
            f"{where}: get_rng_state_tracker",
            got=repr(get_tracker) if tracker is None else f"a function that gives {tracker!r}",
            accepted="a function that gives a tracker, with methods get_states and set_states",
            todo="have it return a te.RNGStatesTracker, or leave it out",
        )
    return tracker


def _with_states(function: Callable[..., Any], tracker: Any) -> Callable[..., Any]:  # noqa: ANN401 - of any make
    """The function, whose every call after the first begins at the tracker's states of now, and leaves none changed."""
    if isinstance(tracker, RNGStatesTracker):
        return function
    states, called = tracker.get_states(), False

    def again(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
        nonlocal called
        if not called:
            called = True
            return function(*args, **kwargs)
        now = tracker.get_states()
        tracker.set_states(states)
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(now)

    return again
