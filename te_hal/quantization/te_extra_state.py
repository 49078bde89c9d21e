"""Extra state that Transformer Engine wrote, in the forms it has had, as this project's SavedState.

============================  =======================================================================
form                          written by
============================  =======================================================================
uint8 tensor, a pickle        2.x, and 0.x/1.x with tensors
``io.BytesIO`` of torch.save  1.x
dict, list                    0.x; as ``torch.load`` has read them, tensors included
uint8 tensor, a pickle of     2.x, ops: one dict a direction, two slots forward and one backward
two dicts
============================  =======================================================================

All of them hold scales and amax histories of both directions, some the recipe, some the inverse scales, which are
left out here as they follow from the scales. Pickles are read by te_hal.quantization.pickle_reader.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from te_hal.quantization.pickle_reader import Made, Name, UnreadablePickleError
from te_hal.quantization.saved_state import SavedState
from te_hal.quantization.saved_tensors import read_saved, tensor_of

ARRAYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_OTHERS = {"recipe", "scale_inv_fwd", "scale_inv_bwd", "extra_fp8_variables", "global_fp8_buffer", "global_fp8_state"}

_MODULE = "transformer_engine.common.recipe"
_DELAYED = Name(_MODULE, "DelayedScaling")
_FORMAT, _LIMITS = Name(_MODULE, "Format"), Name(_MODULE, "_FormatHelper")
_OVERRIDES, _GETATTR = Name(_MODULE, "_OverrideLinearPrecision"), Name("builtins", "getattr")
_STATELESS = {
    Name(_MODULE, name)
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
}
_NAMES = frozenset(
    {_DELAYED, _FORMAT, _LIMITS, _OVERRIDES, _GETATTR, *_STATELESS}
    | {Name(_MODULE, "MMParams"), Name(_MODULE, "QParams")}
)

_FORMAT_OF = {(448, 448): "E4M3", (57344, 57344): "E5M2", (448, 57344): "HYBRID"}
_DEFAULTS: dict[str, Any] = {
    "margin": 0,
    "fp8_format": "HYBRID",
    "amax_compute_algo": "max",
    "scaling_factor_compute_algo": None,
    "reduce_amax": True,
    "backward_override": None,
}
#: Fields that say nothing about the state of a module with gemms: FP8 attention, the update interval of 1.x.
_LEFT_OUT = {"fp8_dpa", "fp8_mha", "interval", "amax_history_len"}


def read_te_state(saved: object) -> SavedState | None:
    """The state in any of the forms; None where the recipe keeps none.

    Args:
        saved: uint8 tensor, ``io.BytesIO``, dict or list; not changed.

    Returns:
        Recipe DelayedScaling with its fields, ``scale_*`` ``[n]`` and ``amax_history_*`` ``[length, n]`` in fp32 on
        the CPU, with three slots a gemm forward and two backward.

    Raises:
        UnreadablePickleError: damaged, of another kind, or with anything else in it.
    """
    if isinstance(saved, list):
        saved = dict(zip(ARRAYS, saved[: len(ARRAYS)], strict=False))
    if isinstance(saved, dict):
        return _state_of(saved, {})
    data = saved.getvalue() if isinstance(saved, io.BytesIO) else _bytes_of(saved)
    value, memory = read_saved(data, _NAMES)
    return None if value is None else _state_of(value, memory)


def _bytes_of(saved: object) -> bytes:
    if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
        raise UnreadablePickleError(f"a {type(saved).__name__}")
    return saved.detach().cpu().contiguous().numpy().tobytes()


def _state_of(value: object, memory: dict[str, bytes]) -> SavedState | None:
    if not isinstance(value, dict) or not value:
        raise UnreadablePickleError(f"a {type(value).__name__} without scaling state")
    if set(value) <= {"forward", "backward"} and all(isinstance(part, dict) for part in value.values()):
        value = {name: entry for part in value.values() for name, entry in part.items()}
    unknown = [str(key) for key in value if key not in _OTHERS and key not in ARRAYS]
    if unknown:
        raise UnreadablePickleError(f"entries {', '.join(unknown)}")
    recipe, present = value.get("recipe"), [name for name in ARRAYS if name in value]
    if not present and (recipe is None or (isinstance(recipe, Made) and recipe.of in _STATELESS)):
        return None
    if len(present) != len(ARRAYS):
        raise UnreadablePickleError(f"only {', '.join(present) or 'a recipe'} of {', '.join(ARRAYS)}")
    arrays = {name: _array(name, value[name], memory) for name in ARRAYS}
    _check_sizes(arrays)
    rows = arrays["amax_history_fwd"].shape[0]
    fields = {**_DEFAULTS, **_fields(recipe, value.get("extra_fp8_variables")), "amax_history_len": rows}
    return SavedState("DelayedScaling", fields, _with_output_slots(arrays))


def _array(name: str, value: object, memory: dict[str, bytes]) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else tensor_of(value, memory)
    if tensor.dtype != torch.float32 or tensor.dim() != (1 if name.startswith("scale") else 2):
        raise UnreadablePickleError(f"{name} as {tensor.dtype} of shape {tuple(tensor.shape)}")
    tensor = tensor.detach().to("cpu", copy=True).contiguous()
    right = tensor.isfinite() & (tensor > 0) if name.startswith("scale") else ~(tensor < 0)
    if not bool(right.all()):
        raise UnreadablePickleError(f"{name} with values that no {'scale' if name.startswith('scale') else 'amax'} has")
    return tensor


def _check_sizes(arrays: dict[str, torch.Tensor]) -> None:
    rows = {arrays[name].shape[0] for name in ("amax_history_fwd", "amax_history_bwd")}
    if len(rows) != 1 or 0 in rows:
        raise UnreadablePickleError(f"amax histories of {sorted(rows)} rows")
    for way in ("fwd", "bwd"):
        if arrays[f"scale_{way}"].shape[0] != arrays[f"amax_history_{way}"].shape[1]:
            raise UnreadablePickleError(f"scales and amax history ({way}) of different sizes")


def _with_output_slots(arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """0.x kept two slots a gemm forward and one backward: the last of each group is new, and so starts anew."""
    forward, backward = arrays["scale_fwd"].shape[0], arrays["scale_bwd"].shape[0]
    if forward == 2 * backward:
        groups = {"fwd": 2, "bwd": 1}
        return {name: _widened(array, groups[name[-3:]]) for name, array in arrays.items()}
    if 2 * forward != 3 * backward:
        raise UnreadablePickleError(f"{forward} forward and {backward} backward slots")
    return arrays


def _widened(array: torch.Tensor, group: int) -> torch.Tensor:
    fill = 1.0 if array.dim() == 1 else 0.0
    grouped = array.view(*array.shape[:-1], -1, group)
    return torch.nn.functional.pad(grouped, (0, 1), value=fill).flatten(-2)


def _fields(recipe: object, variables: object) -> dict[str, Any]:
    """The recipe's fields by name; without a recipe (1.x), its format by the largest values that were in use."""
    if recipe is None:
        known = variables if isinstance(variables, dict) else {}
        limits = known.get("fp8_max_fwd"), known.get("fp8_max_bwd")
        return {} if None in limits else {"fp8_format": _format_of(limits)}
    if not isinstance(recipe, Made) or recipe.of != _DELAYED or recipe.arguments or not isinstance(recipe.state, dict):
        raise UnreadablePickleError(f"a recipe {recipe.of if isinstance(recipe, Made) else type(recipe).__name__}")
    fields: dict[str, Any] = {}
    for name, value in recipe.state.items():
        if name == "fp8_format":
            fields[name] = _format_of(value)
        elif name == "override_linear_precision":
            _check_no_override(value)
        elif name in _DEFAULTS and isinstance(value, (bool, int, str, type(None))):
            fields[name] = value
        elif name not in _LEFT_OUT and not str(name).startswith("_"):
            raise UnreadablePickleError(f"a recipe with {name} as {type(value).__name__}")
    return fields


def _format_of(value: object) -> str:
    """The name: recorded as the two largest values, bare or in the enumeration's own class, or by attribute."""
    if isinstance(value, Made) and value.of == _GETATTR and value.arguments[:1] == (_FORMAT,):
        found = value.arguments[1] if len(value.arguments) == 2 else None  # noqa: PLR2004 - object and name
    else:
        for of in (_FORMAT, _LIMITS):
            if isinstance(value, Made) and value.of == of and value.arguments:
                value = value.arguments[0] if of == _FORMAT else value.arguments
        limits = value if isinstance(value, tuple) and all(isinstance(part, (int, float)) for part in value) else ()
        found = _FORMAT_OF.get(limits)
    if found not in _FORMAT_OF.values():
        raise UnreadablePickleError("a format that is none of E4M3, E5M2, HYBRID")
    return str(found)


def _check_no_override(value: object) -> None:
    flags = value.arguments if isinstance(value, Made) and value.of == _OVERRIDES else value
    if flags != (False, False, False):
        raise UnreadablePickleError("a recipe that runs single gemms unquantized (override_linear_precision)")
