"""The calls that a fused op is made of, described from the description of its own call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.schema.formats import ScalingMode
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from te_hal.schema.support import Kind

_FP32 = torch.float32
_COPY_FLAGS = ("dtype", "rowwise", "columnwise", "columnwise_order")


def quantize_parts(call: Call) -> dict[str, Call]:
    """Of quantize_current."""
    dtype = call.kinds["input"]
    flags = {**_copies(call), "mode": ScalingMode.TENSOR}
    return {
        "amax": Call("amax", call.device, {"input": dtype, "out": None}),
        "compute_scale": Call("compute_scale", call.device, {"amax": _FP32}),
        "quantize": _quantize(call, dtype, flags, scale=_FP32, out=call.kinds["out"]),
    }


def norm_parts(call: Call) -> dict[str, Call]:
    """Of layernorm_quantize and rmsnorm_quantize: the norm, and the cast of what it gives."""
    forward = call.op.replace("_quantize", "_fwd")
    kinds = {name: kind for name, kind in call.kinds.items() if name in {"input", "weight", "bias"}}
    flags = {"zero_centered_gamma": call.flags["zero_centered_gamma"], "out_dtype": _between(call)}
    return {"norm": Call(forward, call.device, kinds, flags), **_cast_parts(call, _between(call))}


def activation_parts(call: Call) -> dict[str, Call]:
    """Of activation_quantize and activation_bwd_quantize: the activation in fp32, the cast, the bias gradient."""
    op = call.op.replace("_quantize", "") if call.op.startswith("activation_bwd") else "activation_fwd"
    kinds = {name: kind for name, kind in call.kinds.items() if name in {"input", "grad_output"}}
    flags = {"activation": call.flags["activation"], "out_dtype": _FP32}
    parts = {"activation": Call(op, call.device, kinds, flags)}
    if _has_own_tensor_scale(call):  # the amax is that of the fp32 result, before it is rounded
        parts |= _tensor_scale_parts(call)
    else:
        parts |= _cast_parts(call, _between(call))
    if call.flags.get("bias_grad"):
        result = {"out_dtype": call.kinds["input"]}
        parts["bias_grad"] = Call("bias_grad", call.device, {"grad_output": _between(call)}, result)
    return parts


def bias_grad_parts(call: Call) -> dict[str, Call]:
    """Of bias_grad_quantize."""
    dtype = call.kinds["grad_output"]
    bias_grad = Call("bias_grad", call.device, {"grad_output": dtype}, {"out_dtype": dtype})
    return {"bias_grad": bias_grad, **_cast_parts(call, dtype)}


def _between(call: Call) -> Kind:
    """The dtype of what is cast: fp32 with a given scale, else that of the input (F1, F2)."""
    return _FP32 if call.kinds["scale"] is not None else call.kinds["input"]


def _has_own_tensor_scale(call: Call) -> bool:
    return call.kinds["scale"] is None and call.flags["mode"] == ScalingMode.TENSOR


def _cast_parts(call: Call, dtype: Kind) -> dict[str, Call]:
    """quantize, or where the tensor's own amax gives its scale quantize_current."""
    if _has_own_tensor_scale(call):
        kinds = {"input": dtype, "out": None}
        return {"quantize_current": Call("quantize_current", call.device, kinds, _copies(call))}
    flags = {**_copies(call), "mode": call.flags["mode"]}
    return {"quantize": _quantize(call, dtype, flags, scale=call.kinds["scale"], amax=call.kinds["amax"])}


def _tensor_scale_parts(call: Call) -> dict[str, Call]:
    flags = {**_copies(call), "mode": ScalingMode.TENSOR}
    return {
        "amax": Call("amax", call.device, {"input": _FP32, "out": None}),
        "compute_scale": Call("compute_scale", call.device, {"amax": _FP32}),
        "quantize": _quantize(call, call.kinds["input"], flags, scale=_FP32),
    }


def _quantize(
    call: Call, dtype: Kind, flags: Mapping[str, object], *, scale: Kind, amax: Kind = None, out: Kind = None
) -> Call:
    return Call("quantize", call.device, {"input": dtype, "scale": scale, "amax": amax, "out": out}, flags)


def _copies(call: Call) -> dict[str, object]:
    return {name: call.flags[name] for name in _COPY_FLAGS}
