"""The exact oracles by op: from the arguments of a call to every result and every operand that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from te_hal.schema.formats import ScalingMode, code_format, element_format
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.testing.oracles import cast, nvfp4

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.formats import ElementFormat

    #: Results by name: an array, or for a storage its copies (True: rowwise).
    Results = dict[str, Any]

_F32 = np.float32


def _amax(given: dict[str, Any]) -> Results:
    found = cast.amax_of(cast.as_rows(given["input"]))
    if given["out"] is None:
        return {"amax": np.array([found])}
    known = given["out"].numpy()
    merged = np.where(np.isnan(known), found, np.maximum(known, found)).astype(_F32)
    return {"amax": merged, "out": merged}


def _compute_scale(given: dict[str, Any]) -> Results:
    amax = given["amax"].numpy()
    made = [
        cast.scale_of(
            _F32(value), given["fp8_max"], given["epsilon"], given["value_for_inf"], power_of_2=given["power_of_2"]
        )
        for value in amax.reshape(-1)
    ]
    return {"scale": np.array(made, _F32).reshape(amax.shape)}


def _quantize(given: dict[str, Any]) -> Results:
    fmt, mode = code_format(given["dtype"]), ScalingMode(given["mode"])
    scale = None if given["scale"] is None else _F32(given["scale"].item())
    settings = {"amax_epsilon": given["amax_epsilon"], "power_of_2": given["power_of_2"]}
    results = _copies(given, fmt, mode, scale, settings)
    if given["amax"] is not None:
        results["amax"] = _amax({"input": given["input"], "out": given["amax"]})["amax"]
    return results


def _quantize_current(given: dict[str, Any]) -> Results:
    fmt = element_format(given["dtype"])
    amax = cast.amax_of(cast.as_rows(given["input"]))
    largest = float(np.finfo(_F32).max)
    scale = cast.scale_of(amax, fmt.max, given["amax_epsilon"], largest, power_of_2=given["power_of_2"])
    return _copies(given, fmt, ScalingMode.TENSOR, scale, {})


def _copies(
    given: dict[str, Any],
    fmt: ElementFormat,
    mode: ScalingMode,
    scale: np.float32 | None,
    settings: dict[str, Any],
) -> Results:
    values = cast.as_rows(given["input"])
    copies: dict[bool, Any] = {}
    for rowwise, wanted in ((True, given["rowwise"]), (False, given["columnwise"])):
        if wanted and mode in NVFP4_MODES:
            copies[rowwise] = nvfp4.quantized(values, mode, rowwise=rowwise, seed=given["rounding_seed"])
        elif wanted:
            copies[rowwise] = cast.quantized(
                values, given["input"].dtype, fmt, mode, scale=scale, rowwise=rowwise, **settings
            )
    return {"output": copies} if given["out"] is None else {"output": copies, "out": copies}


def _dequantize(given: dict[str, Any]) -> Results:
    storage = given["input"]
    dtype = given["out_dtype"] or storage.dtype
    decode = nvfp4.dequantized if storage.mode in NVFP4_MODES else cast.dequantized
    values = torch.from_numpy(decode(storage)).reshape(storage.shape)
    return {"output": values.to(dtype)}


def _update(history: torch.Tensor, scale: torch.Tensor, reduced: torch.Tensor | None, given: dict[str, Any]) -> None:
    """D1 to D4 of one history, in place, column by column."""
    rows, cols = history.shape
    old, used = history.numpy(), scale.numpy()
    for column in range(cols):
        newest = old[0, column]
        if reduced is not None and reduced[column] != 0:
            newest = _F32(reduced[column].item())
        if newest == 0:
            continue
        past = old[:, column].copy()
        amax = newest
        if given["amax_compute_algo"] == "max":
            # Not numpy's fmax, which loses its other operand to a signalling NaN.
            window = np.append(past[1:], newest)
            amax = window[~np.isnan(window)].max(initial=0) if not np.isnan(window).all() else newest
        old[: rows - 1, column] = past[1:]
        old[rows - 1, column] = newest
        old[0, column] = 0
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                made = _F32(given["fp8_max"] * 2.0 ** -given["margin"]) / amax
            used[column] = np.finfo(_F32).max if np.isinf(made) else made


def _update_delayed_scale(given: dict[str, Any]) -> Results:
    history, scale = given["amax_history"].clone(), given["scale"].clone()
    _update(history, scale, given["reduced_amax"], given)
    return {"amax_history": history, "scale": scale}


def _update_delayed_scales(given: dict[str, Any]) -> Results:
    results: Results = {}
    reduced = given["reduced_amaxes"] or [None] * len(given["scales"])
    for index, (history, scale, amax) in enumerate(zip(given["amax_histories"], given["scales"], reduced, strict=True)):
        made = _update_delayed_scale(
            {
                **given,
                "amax_history": history,
                "scale": scale,
                "reduced_amax": amax,
                "fp8_max": given["fp8_maxima"][index],
            }
        )
        results[f"amax_histories[{index}]"] = made["amax_history"]
        results[f"scales[{index}]"] = made["scale"]
    return results


EXACT: dict[str, Callable[[dict[str, Any]], Results]] = {
    "amax": _amax,
    "compute_scale": _compute_scale,
    "quantize": _quantize,
    "quantize_current": _quantize_current,
    "dequantize": _dequantize,
    "update_delayed_scale": _update_delayed_scale,
    "update_delayed_scales": _update_delayed_scales,
}
