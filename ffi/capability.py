"""Asks a kernel library whether it can do a call: describes it as te_hal_call has it, and gives the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.ffi import codes
from te_hal.schema.backend import ALONG_THE_SUM
from te_hal.schema.formats import FLOATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.gemm import pairing
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import SUPPORTED, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from te_hal.ffi.native import Native
    from te_hal.schema.support import Call, Kind

    Description = dict[str, int]

#: Scaling modes that the marshalling has a code for.
MARSHALLED = frozenset(codes.MODES)


def ask(native: Native, call: Call) -> Support:
    """Whether the library, and the marshalling before it, can do a call. Starts no device and raises nothing."""
    opened = native.opens()
    if not opened:
        return opened
    if native.library.forked:
        # It cannot be asked any more, and the call is refused for a better reason than a no from here.
        return SUPPORTED
    for mode in _modes(call):
        if mode not in MARSHALLED:
            return Support.no(Code.MODE, f"scaling mode {ScalingMode(mode).value!r} is not built yet")
    paired = pairing(call) if call.op == "gemm" else SUPPORTED
    if not paired:
        return paired
    description = _DESCRIPTIONS[call.op](call)
    for dtype in _result_dtypes(call):
        answer = _ask_library(native, {**description, "output_dtype": codes.DTYPES[dtype]} if dtype else description)
        if not answer:
            return answer
    return SUPPORTED


def _ask_library(native: Native, description: Description) -> Support:
    ffi, lib = native.ffi, native.lib
    question = ffi.new("te_hal_call *", {"struct_size": ffi.sizeof("te_hal_call"), **description})
    status = lib.api_supports(native.library.api, question)
    if status == lib.TE_HAL_OK:
        return SUPPORTED
    if status == lib.TE_HAL_UNSUPPORTED:
        return Support.no(Code.NO_KERNEL, native.library.last_error())
    return Support.no(Code.NO_KERNEL, str(native.library.error(status, "the kernel library")))


def _modes(call: Call) -> set[object]:
    modes = {kind.mode for kind in call.kinds.values() if isinstance(kind, StorageKind)}
    return modes | ({call.flags["mode"]} if "mode" in call.flags else set())


def _result_dtypes(call: Call) -> tuple[torch.dtype | None, ...]:
    """What the result may be: the one asked for, else the first operand's; of a storage any, as its kind tells none.

    (None,) where the op's description has it already, or there is no choice.
    """
    if "out_dtype" not in call.flags:
        return (None,)
    asked: Any = call.flags["out_dtype"] or call.kinds.get("out")
    if asked is None:
        asked = next(iter(call.kinds.values())) if not call.op.endswith("activation_bwd") else call.kinds["input"]
    return FLOATS if isinstance(asked, StorageKind) else (asked,)


def _dtype(kind: Kind) -> int:
    if kind is None:
        return codes.NO_DTYPE
    return codes.DTYPES[kind.format.dtype if isinstance(kind, StorageKind) else kind]


def _operand(name: str, kind: Kind, preferred: str = "rowwise") -> Description:
    """dtype, mode and copy of the operand that the description calls ``name``."""
    if not isinstance(kind, StorageKind):
        return {f"{name}_dtype": _dtype(kind)}
    rowwise = kind.rowwise and (preferred == "rowwise" or not kind.columnwise or kind.mode is ScalingMode.TENSOR)
    copy = codes.COPY_ROWWISE if rowwise else codes.COPIES[kind.order]
    return {f"{name}_dtype": _dtype(kind), f"{name}_mode": codes.MODES[kind.mode], f"{name}_copy": copy}


def _plain(op: str) -> Callable[[Call], Description]:
    """Of an op that is told by its first operand's dtype."""
    return lambda call: {"op": codes.OPS[op], "input_dtype": _dtype(next(iter(call.kinds.values())))}


def _quantize(call: Call) -> Description:
    return {
        "op": codes.OPS["quantize"],
        "input_dtype": _dtype(call.kinds["input"]),
        **_copies(call),
        "output_mode": codes.MODES[call.flags["mode"]],  # type: ignore[index] # checked: a ScalingMode
    }


def _copies(call: Call) -> Description:
    """What a cast makes, but for its mode."""
    flags: Any = call.flags
    return {
        "flags": flags["rowwise"] * codes.FLAG_ROWWISE + flags["columnwise"] * codes.FLAG_COLUMNWISE,
        "output_dtype": codes.DTYPES[flags["dtype"]],
        "columnwise_order": codes.ORDERS[ColumnwiseOrder(flags["columnwise_order"])],
    }


def _cast(call: Call) -> Description:
    """What a fused op's cast makes; without a scale, per-tensor scaling finds its own."""
    mode: Any = call.flags["mode"]
    if mode == ScalingMode.TENSOR and call.kinds["scale"] is None:
        return _own_cast(call)
    return {**_copies(call), "output_mode": codes.MODES[mode]}


def _own_cast(call: Call) -> Description:
    return {**_copies(call), "output_mode": codes.MODE_TENSOR_CURRENT}


def _dequantize(call: Call) -> Description:
    return {"op": codes.OPS["dequantize"], **_operand("input", call.kinds["input"])}


def _gemm(call: Call) -> Description:
    flags: Any = call.flags
    reads = ALONG_THE_SUM[flags["layout"]]
    return {
        "op": codes.OPS["gemm"],
        "kind": codes.LAYOUTS[flags["layout"]],
        "flags": codes.FLAG_ACCUMULATE if flags["accumulate"] else 0,
        **_operand("input", call.kinds["a"], reads.a),
        **_operand("other", call.kinds["b"], reads.b),
        "bias_dtype": _dtype(call.kinds["bias"]),
    }


def _norm_fwd(call: Call) -> Description:
    return {
        "op": codes.OPS["norm_fwd"],
        **_norm(call),
        "bias_dtype": _dtype(call.kinds.get("bias")),
    }


def _norm_bwd(call: Call) -> Description:
    grad, dtype = call.kinds["grad_output"], _dtype(call.kinds["input"])
    return {"op": codes.OPS["norm_bwd"], **_norm(call), "bias_dtype": _dtype(grad), "output_dtype": dtype}


def _norm(call: Call) -> Description:
    return {
        "kind": codes.LAYERNORM if call.op.startswith("layernorm") else codes.RMSNORM,
        "flags": codes.FLAG_ZERO_CENTERED_GAMMA if call.flags["zero_centered_gamma"] else 0,
        "input_dtype": _dtype(call.kinds["input"]),
        "other_dtype": _dtype(call.kinds["weight"]),
    }


def _softmax_fwd(call: Call) -> Description:
    flags: Any = call.flags
    return {
        "op": codes.OPS["softmax_fwd"],
        "kind": codes.CAUSAL[flags["causal"]],
        "flags": 0 if call.kinds["mask"] is None else codes.FLAG_MASK,
        "input_dtype": _dtype(call.kinds["input"]),
    }


def _softmax_bwd(call: Call) -> Description:
    flags: Any = call.flags
    grad = _dtype(call.kinds["grad_output"])
    return {
        "op": codes.OPS["softmax_bwd"],
        "kind": codes.CAUSAL[flags["causal"]],
        "input_dtype": _dtype(call.kinds["output"]),
        "other_dtype": grad,
        "output_dtype": grad,
    }


def _activation(call: Call) -> Description:
    flags: Any = call.flags
    return {
        "op": codes.OPS[call.op],
        "kind": codes.ACTIVATION_KINDS[flags["activation"]],
        "input_dtype": _dtype(call.kinds["input"]),
        "other_dtype": _dtype(call.kinds.get("grad_output")),
    }


def _quantize_current(call: Call) -> Description:
    return {"op": codes.OPS["quantize"], "input_dtype": _dtype(call.kinds["input"]), **_own_cast(call)}


def _norm_quantize(call: Call) -> Description:
    norm = _norm(call)
    cast = _cast(call)
    return {
        **norm,
        **cast,
        "op": codes.OPS["norm_quantize"],
        "flags": norm["flags"] | cast["flags"],
        "bias_dtype": _dtype(call.kinds.get("bias")),
    }


def _activation_quantize(call: Call) -> Description:
    sums = call.kinds["input"] if call.flags.get("bias_grad") else None
    return {**_activation(call), **_cast(call), "bias_dtype": _dtype(sums)}


def _bias_grad_quantize(call: Call) -> Description:
    dtype = _dtype(call.kinds["grad_output"])
    return {"op": codes.OPS["bias_grad_quantize"], "input_dtype": dtype, "bias_dtype": dtype, **_cast(call)}


def _bias_activation(call: Call) -> Description:
    return {**_activation(call), "bias_dtype": _dtype(call.kinds["bias"])}


def _bias_residual(call: Call) -> Description:
    residual = _dtype(call.kinds["residual"])
    return {
        "op": codes.OPS["bias_residual"],
        "input_dtype": _dtype(call.kinds["input"]),
        "other_dtype": residual,
        "bias_dtype": _dtype(call.kinds["bias"]),
        "output_dtype": residual,
    }


_DESCRIPTIONS: dict[str, Callable[[Call], Description]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "amax": _plain("amax"),
    "compute_scale": _plain("compute_scale"),
    "update_delayed_scale": _plain("update_delayed_scale"),
    "update_delayed_scales": _plain("update_delayed_scale"),
    "gemm": _gemm,
    "bias_grad": _plain("bias_grad"),
    "layernorm_fwd": _norm_fwd,
    "layernorm_bwd": _norm_bwd,
    "rmsnorm_fwd": _norm_fwd,
    "rmsnorm_bwd": _norm_bwd,
    "softmax_fwd": _softmax_fwd,
    "softmax_bwd": _softmax_bwd,
    "activation_fwd": _activation,
    "activation_bwd": _activation,
    "quantize_current": _quantize_current,
    "layernorm_quantize": _norm_quantize,
    "rmsnorm_quantize": _norm_quantize,
    "activation_quantize": _activation_quantize,
    "activation_bwd_quantize": _activation_quantize,
    "bias_grad_quantize": _bias_grad_quantize,
    "bias_activation_fwd": _bias_activation,
    "bias_activation_bwd": _bias_activation,
    "bias_residual": _bias_residual,
}
