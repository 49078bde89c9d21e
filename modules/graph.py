"""make_graphed_callables: modules captured into device graphs, where the device has them."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from te_hal.quantization import autocast, get_default_recipe
from te_hal.quantization.block_arguments import check_block
from te_hal.schema.errors import ArgumentTypeError, UnsupportedError
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.recipe import Recipe

#: What torch's module of a device type with graphs has.
_CAPTURE = "make_graphed_callables"

_REFUSED = declare(
    "make_graphed_callables",
    {
        "sample_kwargs": None,
        "amax_reduction_group": None,
        "cache_quantized_params": False,
        "retain_graph_in_backward": False,
    },
    {
        "sample_kwargs": "torch's capture, which this calls, takes arguments by position alone",
        "amax_reduction_group": "recipes that keep amax values are refused in a graph, so that there is none to reduce",
        "cache_quantized_params": "torch's capture, which this calls, keeps nothing of its own between replays",
        "retain_graph_in_backward": "torch's capture, which this calls, has no such argument",
    },
)


def make_graphed_callables(
    modules: torch.nn.Module | Sequence[torch.nn.Module],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: object = None,
    *,
    enabled: bool = False,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: object = None,
    cache_quantized_params: bool = False,
    pool: object = None,
    retain_graph_in_backward: bool = False,
) -> Any:  # noqa: ANN401 - what was given: a module, or several
    """Capture forward and backward of modules into graphs, by torch; their ``forward`` replays them in place.

    Capture is torch's own, the function of this name in its module for the device; its rules hold: static shapes, no
    hooks, no synchronisation. Of te_hal's backends ``cuda`` has been run so.

    Args:
        modules: one, or several that are called in this order.
        sample_args: the arguments of one call, a tuple of tensors; of several modules a tuple of these.
        num_warmup_iters: calls before the capture.
        allow_unused_input: inputs may get no gradient.
        sample_kwargs: of a later feature; anything but the default is refused by name.
        enabled: run the modules in FP8, by a recipe whose scales come from the tensors themselves.
        recipe: None: the default one.
        pool: of graph memory, to share.
        calibrating: True is refused: what it records is state.
        amax_reduction_group: of a later feature, likewise.
        cache_quantized_params: of a later feature, likewise.
        retain_graph_in_backward: of a later feature, likewise.

    Returns:
        ``modules``; their ``forward`` replays graphs in the mode (training or not) of the capture.

    Raises:
        ArgumentTypeError: something that is no module.
        UnsupportedError: parameters or arguments elsewhere than on a device with graphs; a recipe with state, which
            rolls outside of graphs; an argument of a later feature.
    """
    where = "make_graphed_callables"
    refuse(where, locals(), _REFUSED)
    check_block(
        where, {"enabled": enabled, "calibrating": calibrating, "allow_unused_input": allow_unused_input}, recipe
    )
    given = (modules,) if isinstance(modules, torch.nn.Module) else tuple(modules)
    for module in given:
        if not isinstance(module, torch.nn.Module):
            raise ArgumentTypeError(
                where, got=f"a {type(module).__name__}", accepted="torch modules", todo="pass those"
            )
    capture = _capture_of(where, given, sample_args)
    if enabled or calibrating:
        chosen = get_default_recipe() if recipe is None else recipe
        _check_recipe(where, chosen, calibrating=calibrating)
        for module in given:
            module.forward = _in_fp8(module.forward, chosen)  # as torch will
    return capture(
        modules,
        sample_args,
        num_warmup_iters=num_warmup_iters,
        allow_unused_input=allow_unused_input,
        pool=pool,
    )


def _capture_of(where: str, modules: Sequence[torch.nn.Module], sample_args: Sequence[Any]) -> Callable[..., Any]:
    """The function of torch for the device that everything is on."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for argument in sample_args:
        tensors += [each for each in (argument if isinstance(argument, tuple) else (argument,)) if _is_tensor(each)]
    types = sorted({tensor.device.type for tensor in tensors})
    capture = getattr(torch.get_device_module(types[0]), _CAPTURE, None) if len(types) == 1 else None
    if capture is None:
        raise UnsupportedError(
            where,
            got=f"parameters or arguments on {', '.join(types) or 'no device'}",
            accepted="all on one device whose graphs torch captures",
            todo="call the modules as they are: results are the same",
        )
    found: Callable[..., Any] = capture
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _check_recipe(where: str, recipe: Recipe, *, calibrating: bool) -> None:
    """Scaling state rolls in Python, which a graph does not replay."""
    if calibrating or recipe.delayed() or recipe.custom():
        raise UnsupportedError(
            f"{where}: {'calibrating' if calibrating else 'recipe'}",
            got="True" if calibrating else type(recipe).__name__,
            accepted="a recipe without state: Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling",
            todo="use one of these, or leave the modules uncaptured",
        )


def _in_fp8(forward: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any module
        with autocast(recipe=recipe):
            return forward(*args, **kwargs)

    return wrapper
