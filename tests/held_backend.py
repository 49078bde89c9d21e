"""A backend that is held to cpu_reference: every cast, amax, scale and history for the inputs that come."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from block_oracle import real_scales
from native_backends import assert_nearly_same_codes, same

import te_hal
from te_hal import ops
from te_hal.dispatch import Backend, register_backend, registry
from te_hal.schema.formats import ScalingMode
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from native_backends import NativeBackend

#: Every op that casts or scales; of bias_grad_quantize the sums are no codes, and have a bound of their own.
EXACT = (
    *("quantize", "quantize_current", "bias_grad_quantize", "amax", "compute_scale"),
    *("update_delayed_scale", "update_delayed_scales"),
)
#: Ops that cast what they compute: the last bit of an exponential or a root may decide a rounding.
NEARLY = ("layernorm_quantize", "rmsnorm_quantize", "activation_quantize", "activation_bwd_quantize")
TWO_UNITS = 2.0**-22


class Held:
    """A backend that runs another one's kernels, and cpu_reference's beside those that cast or scale, and compares.

    Attributes:
        calls: how often each of those ran.
    """

    def __init__(self, native: NativeBackend) -> None:
        self.calls: Counter[str] = Counter()
        backends = registry.tables().backends
        source = backends[native.name]
        held = {*EXACT, *NEARLY}
        kernels = {op: self.compared(op, k) if op in held else k for op, k in source.kernels.items()}
        register_backend(
            Backend(
                name="held",
                kernels=kernels,
                serves=source.serves,
                supports=source.supports,
                gemm_copies=source.gemm_copies,
                columnwise_order=source.columnwise_order,
            )
        )

    def compared(self, op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        reference, agree = getattr(ops, op), equal if op in EXACT else nearly_equal

        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = [[on_cpu(x) for x in args], {name: on_cpu(x) for name, x in kwargs.items()}]
            result = kernel(*args, **kwargs)
            with te_hal.use_backend("cpu_reference"):
                expected = reference(*own[0], **own[1])
            written = zip((*args, *kwargs.values(), result), (*own[0], *own[1].values(), expected), strict=True)
            assert all(agree(found, wanted) for found, wanted in written), op
            self.calls[op] += 1
            return result

        return run


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, QuantizedStorage):
        return value.with_tensors(tuple(None if t is None else on_cpu(t) for t in value.tensors()))
    if isinstance(value, tuple):
        return tuple(on_cpu(item) for item in value)
    return value


def equal(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return same(found, expected)
    if isinstance(found, QuantizedStorage):
        return all(same(a, b) for a, b in zip(compared_buffers(found), compared_buffers(expected), strict=True))
    if isinstance(found, tuple) and isinstance(found[0], QuantizedStorage):
        return equal(found[0], expected[0]) and torch.allclose(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)
    if isinstance(found, tuple):
        return all(equal(a, b) for a, b in zip(found, expected, strict=True))
    return bool(found == expected)


def compared_buffers(storage: QuantizedStorage) -> tuple[torch.Tensor | None, ...]:
    """Codes and scales of both copies; of scales per block the real ones, without their padding."""
    row, row_scales, column, column_scales = storage.tensors()
    if storage.mode is ScalingMode.TENSOR:
        return row, row_scales, column, column_scales
    shape = (storage.numel() // storage.shape[-1], storage.shape[-1])
    scales = [
        None if held is None else real_scales(held.cpu(), storage.mode, shape, rowwise=rowwise).contiguous()
        for held, rowwise in ((row_scales, True), (column_scales, False))
    ]
    return row, scales[0], column, scales[1]


def nearly_equal(found: Any, expected: Any) -> bool:
    """Codes by assert_nearly_same_codes; fp32 within two units in the last place, results of norms within bf16's."""
    if isinstance(found, QuantizedStorage):
        for name in ("rowwise", "columnwise"):
            codes, wanted = (getattr(storage, f"{name}_data") for storage in (found, expected))
            if wanted is not None:
                assert_nearly_same_codes(codes, wanted)
                torch.testing.assert_close(
                    *(getattr(storage, f"{name}_scale_inv").cpu() for storage in (found, expected)),
                    rtol=TWO_UNITS,
                    atol=0,
                )
        return True
    if isinstance(found, torch.Tensor):
        rtol = 1e-2 if found.dtype == torch.bfloat16 else 1e-5
        return torch.allclose(found.cpu(), expected, rtol=rtol, atol=rtol)
    if isinstance(found, tuple):
        return all(nearly_equal(a, b) for a, b in zip(found, expected, strict=True))
    return bool(found == expected)
