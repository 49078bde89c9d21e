"""Ops that compute and cast: the bytes are the cast of the same kernels' own fp32 result (docs/numerics.md, F1 to F3).

Against cpu_reference the last bit of an exponential or a reciprocal root may decide a rounding: amax and scale_inv
within two units in the last place, one code in a thousand one off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from closeness import relative_error
from hard_values import copy_flags, draw
from native_backends import assert_nearly_same_codes, assert_same_storage, same

import te_hal
from te_hal import ops
from te_hal.schema.activation import ACTIVATIONS, GATED
from te_hal.schema.formats import E4M3, E5M2, FLOATS, element_format
from te_hal.schema.fused import ACTIVATION_BWD_QUANTIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from native_backends import NativeBackend

    from te_hal.schema.storage import QuantizedStorage

SHAPES = [(1, 264), (13, 72), (2, 5, 48), (136, 264), (130, 1101), (0, 16)]
#: For every activation.
FEW = [(13, 72), (2, 5, 48), (130, 1101), (0, 16)]
UNITS = 2


class Cast(NamedTuple):
    """How a result is cast; ``scale`` None: by its own amax."""

    scale: float | None = None
    copies: str = "row + transposed"
    dtype: torch.dtype = E4M3.dtype
    epsilon: float = 0.0
    power_of_2: bool = False

    def flags(self, native: NativeBackend) -> dict[str, Any]:
        """Arguments of a fused op."""
        flags = {"dtype": self.dtype, **copy_flags(self.copies)}
        if self.scale is None:
            return {**flags, "amax_epsilon": self.epsilon, "power_of_2": self.power_of_2}
        scaling = {"scale": torch.tensor([self.scale]), "amax": torch.tensor([0.25])}
        return {**flags, **{name: native.put(tensor) for name, tensor in scaling.items()}}


CASTS = {
    "delayed": Cast(0.7),
    "delayed, columns": Cast(0.7, "transposed", E5M2.dtype),
    "delayed, same order": Cast(0.7, "row + same order"),
    "current": Cast(),
    "current, row": Cast(copies="row", dtype=E5M2.dtype),
    "current, floor and powers of two": Cast(copies="transposed", epsilon=64.0, power_of_2=True),
}
CPU = type("Cpu", (), {"put": staticmethod(lambda tensor: tensor)})()


def cast_by_rule(
    native: NativeBackend, cast: Cast, fp32: torch.Tensor, dtype: torch.dtype, amax_of: str
) -> tuple[QuantizedStorage, torch.Tensor | None]:
    """The cast of a kernel's fp32 result, and what was recorded; ``amax_of`` a rounded result, or the fp32 one."""
    flags = {"dtype": cast.dtype, **copy_flags(cast.copies)}
    if cast.scale is not None:
        amax = native.put(torch.tensor([0.25]))
        made = ops.quantize(fp32, native.put(torch.tensor([cast.scale])), amax=amax, **flags)
        return made.with_tensors(made.tensors(), dtype), amax
    rounded = fp32.to(dtype)
    own = {"epsilon": cast.epsilon, "power_of_2": cast.power_of_2}
    largest = ops.amax(rounded if amax_of == "rounded" else fp32)
    scale = ops.compute_scale(largest, fp8_max=element_format(cast.dtype).max, **own)
    return ops.quantize(rounded, scale, **flags), None


def assert_own_cast(
    native: NativeBackend, name: str, run: Callable[..., Any], fp32: torch.Tensor, dtype: torch.dtype, amax_of: str
) -> Any:
    """``run`` the fused op with the flags of a cast; its storage is that of the fp32 result. All that it returns."""
    cast = CASTS[name]
    flags = cast.flags(native)
    with native.use():
        results = run(**flags)
        expected, amax = cast_by_rule(native, cast, fp32, dtype, amax_of)
    storage = results[0] if isinstance(results, tuple) else results
    assert_same_storage(storage, expected)
    assert amax is None or same(flags["amax"], amax)
    return results


def affine(norm: str, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(2 if norm == "layernorm" else 1)]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norms_bytes(shape: tuple[int, ...], norm: str, cast: str, ordered: NativeBackend) -> None:
    dtype = FLOATS[SHAPES.index(shape) % len(FLOATS)]
    operands = [ordered.put(t) for t in (draw(shape, dtype, "wide"), *affine(norm, shape[-1], dtype))]
    options = {"zero_centered_gamma": cast == "current", "epsilon": 1e-3}
    with ordered.use():
        fp32, *statistics = getattr(ops, f"{norm}_fwd")(*operands, out_dtype=torch.float32, **options)

    def run(**flags: Any) -> Any:
        return getattr(ops, f"{norm}_quantize")(*operands, **flags, **options)

    results = assert_own_cast(ordered, cast, run, fp32, dtype, "rounded")
    assert all(same(found, own) for found, own in zip(results[1:], statistics, strict=True))


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_an_activations_bytes(shape: tuple[int, ...], activation: str, cast: str, native: NativeBackend) -> None:
    dtype = FLOATS[ACTIVATIONS.index(activation) % len(FLOATS)]
    gated = 2 if activation in GATED else 1
    x = native.put(draw((*shape[:-1], gated * shape[-1]), dtype, "any bits"))
    with native.use():
        fp32 = ops.activation_fwd(x, activation=activation, out_dtype=torch.float32)
    assert_own_cast(
        native, cast, lambda **f: ops.activation_quantize(x, activation=activation, **f), fp32, dtype, "fp32"
    )


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_an_activations_gradient_and_its_sums(
    shape: tuple[int, ...], activation: str, cast: str, native: NativeBackend
) -> None:
    dtype = FLOATS[ACTIVATIONS.index(activation) % len(FLOATS)]
    gated = 2 if activation in GATED else 1
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(*shape[:-1], n * shape[-1], generator=generator).to(dtype) for n in (gated, 1))
    x, grad = native.put(x), native.put(grad)
    with native.use():
        fp32 = ops.activation_bwd(grad, x, activation=activation, out_dtype=torch.float32)

    def run(**flags: Any) -> Any:
        return ops.activation_bwd_quantize(grad, x, activation=activation, bias_grad=True, **flags)

    _, sums = assert_own_cast(native, cast, run, fp32, dtype, "fp32")
    summed = fp32 if CASTS[cast].scale is not None else fp32.to(dtype)
    exact = summed.reshape(-1, x.shape[-1]).cpu().double().sum(0)
    assert sums.dtype == dtype
    # A single row is not summed, but rounded: fewer than the 256 results of which the bound speaks.
    bound = ACTIVATION_BWD_QUANTIZE.contract.bound[dtype] * (1 if exact.numel() >= 256 else 1.5)
    assert relative_error(sums.cpu(), exact) <= bound


def test_clamped_swiglu_takes_its_numbers(native: NativeBackend) -> None:
    numbers = {"activation": "clamped_swiglu", "limit": 2.0, "alpha": 1.1, "glu_linear_offset": 0.5}
    x = native.put(draw((13, 144), torch.float32, "wide"))
    with native.use():
        fp32 = ops.activation_fwd(x, **numbers, out_dtype=torch.float32)
    assert_own_cast(native, "current", lambda **f: ops.activation_quantize(x, **numbers, **f), fp32, x.dtype, "fp32")


@pytest.mark.parametrize("scale", [0.7, None], ids=["delayed", "current"])
@pytest.mark.parametrize("op", ["layernorm", "rmsnorm", "gelu", "swiglu", "qgeglu", "srelu"])
def test_codes_and_scales_are_nearly_the_references(op: str, scale: float | None, native: NativeBackend) -> None:
    cast = Cast(scale)
    x = torch.randn(136, 528, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameters = affine(op, 528, torch.bfloat16) if op.endswith("norm") else []

    def run(put: Callable[[torch.Tensor], torch.Tensor], flags: dict[str, Any]) -> QuantizedStorage:
        operands = [put(tensor) for tensor in (x, *parameters)]
        if op.endswith("norm"):
            return getattr(ops, f"{op}_quantize")(*operands, **flags)[0]
        return ops.activation_quantize(*operands, activation=op, **flags)

    own, reference = cast.flags(native), cast.flags(CPU)
    with native.use():
        found = run(native.put, own)
    with te_hal.use_backend("cpu_reference"):
        expected = run(CPU.put, reference)
    for name in ("rowwise_data", "columnwise_data"):
        assert_nearly_same_codes(getattr(found, name), getattr(expected, name))
    pairs = [(found.rowwise_scale_inv, expected.rowwise_scale_inv)]
    pairs += [] if scale is None else [(own["amax"], reference["amax"])]
    for a, b in pairs:
        np.testing.assert_array_max_ulp(a.cpu().numpy(), b.numpy(), maxulp=UNITS)


@pytest.mark.parametrize("copies", ["row", "transposed", "row + transposed"])
@pytest.mark.parametrize("rows", [1, 8, 15, 130])
def test_rows_that_are_none_leave_the_amax_alone(rows: int, copies: str, native: NativeBackend) -> None:
    """Rows are normalised to 1 and -1 and become 0.1 and -1; beta alone is -5."""
    x = native.put(torch.tensor([[1.0, -1.0]]).repeat(rows, 12))
    weight, beta = torch.ones(24), torch.zeros(24)
    weight[0], beta[0] = 4.9, -5.0
    scaling = {"scale": native.put(torch.ones(1)), "amax": native.put(torch.zeros(1))}
    with native.use():
        ops.layernorm_quantize(
            x, native.put(weight), native.put(beta), **scaling, epsilon=0.0, dtype=E4M3.dtype, **copy_flags(copies)
        )
    assert scaling["amax"].item() == 1.0
