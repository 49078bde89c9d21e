"""Fused kernels: their bytes are the cast of the same kernel's own result.

What is rounded between the two halves is rule F1 to F3 of docs/numerics.md, spelled out in `between` below.
"""

import pytest
import torch
from emulator_orders import ORDERS
from fp8_codes import codes_of
from native_cases import FP8_DTYPES, FP8_MAX, PLAIN_DTYPES, same_bytes
from native_ops import (
    Cast,
    activation_bwd,
    activation_bwd_quantize,
    activation_fwd,
    activation_quantize,
    bias_grad,
    bias_grad_quantize,
    is_gated,
    norm_fwd,
    norm_quantize,
)

from te_hal.backends.cpu_reference.amax import compute_scale
from te_hal.schema.activation import ACTIVATIONS
from te_hal.schema.formats import element_format

E4M3, E5M2 = FP8_DTYPES
BF16 = torch.bfloat16
DELAYED = Cast(scale=0.7, amax=0.25)
CURRENT = Cast()
#: Every choice that takes another way through the kernels.
CASTS = {
    "delayed": DELAYED,
    "delayed-rowwise": DELAYED._replace(columnwise=False),
    "delayed-columnwise": DELAYED._replace(rowwise=False),
    "delayed-same-order": DELAYED._replace(order="SAME"),
    "delayed-e5m2": DELAYED._replace(dtype=E5M2),
    "current": CURRENT,
    "current-rowwise": CURRENT._replace(columnwise=False),
    "current-columnwise": CURRENT._replace(rowwise=False),
    "current-same-order": CURRENT._replace(order="SAME"),
    "current-e5m2-floor-power-of-2": CURRENT._replace(dtype=E5M2, epsilon=64.0, power_of_2=True),
}
#: Less than a tile, tiles cut short on both sides, one row, rows of a block.
SHAPES = ((1, 264), (8, 8), (13, 72), (136, 264), (130, 1101), (3, 4104))


def between(cast, fp32, rounded, *, amax_of_rounded):
    """(what is cast, what amax is of): delayed scaling takes the fp32 result for both."""
    if cast.scale is not None:
        return fp32, fp32
    return rounded, rounded if amax_of_rounded else fp32


def largest(values):
    return values.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).max().reshape(1)


def assert_cast_of(quantized, cast, values, amax_of):
    """Codes by ml_dtypes, the scale by the rules of the reference, everything byte for byte."""
    found = largest(amax_of)
    if cast.scale is not None:
        scale = torch.tensor([cast.scale])
    else:
        options = {"epsilon": cast.epsilon, "power_of_2": cast.power_of_2}
        scale = compute_scale(found, fp8_max=FP8_MAX[cast.dtype], **options)
    codes = torch.from_numpy(codes_of(values.float().numpy(), element_format(cast.dtype), scale.item()))
    expected_amax = found if cast.scale is None else torch.maximum(found, torch.tensor([cast.amax]))

    assert same_bytes(quantized.amax, expected_amax)
    assert same_bytes(quantized.scale, scale)
    assert same_bytes(quantized.scale_inv, torch.ones(1) / scale)
    assert quantized.rowwise is None or same_bytes(quantized.rowwise, codes)
    columns = codes.t() if cast.order == "TRANSPOSED" else codes
    assert quantized.columnwise is None or same_bytes(quantized.columnwise, columns)


def placed(values, dtype, offset):
    room = torch.empty(values.numel() + offset, dtype=dtype)
    return room[offset:].view(values.shape).copy_(values)


def norm_operands(shape, dtype=BF16, offset=0):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp()
    gamma, beta = torch.randn(2, shape[1], generator=generator)
    return placed(x, dtype, offset), placed(gamma, dtype, offset), placed(beta, dtype, offset)


def assert_norm_equals_cast(library, norm, shape, cast, *, dtype=BF16, rounded=BF16, zero_centered=False, offset=0):
    x, gamma, beta = norm_operands(shape, dtype, offset)
    beta = beta if norm == "layernorm" else None
    options = {"zero_centered": zero_centered}
    fp32, mean, rstd = norm_fwd(library, norm, x, gamma, beta, out_dtype=torch.float32, **options)
    plain, *_ = norm_fwd(library, norm, x, gamma, beta, out_dtype=rounded, **options)

    quantized, kept, fused_mean, fused_rstd = norm_quantize(
        library, norm, x, gamma, beta, cast, rounded=rounded, plain=cast.rowwise, offset=offset, **options
    )

    assert_cast_of(quantized, cast, *between(cast, fp32, plain, amax_of_rounded=True))
    assert kept is None or same_bytes(kept, plain)
    assert same_bytes(fused_rstd, rstd)
    assert mean is None or same_bytes(fused_mean, mean)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norms_bytes_are_the_cast_of_its_own_result(host_library, norm, cast, shape):
    assert_norm_equals_cast(host_library, norm, shape, CASTS[cast])


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("cast", ["delayed", "current"])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_norm_and_its_cast_hold_in_every_order_of_threads(library, norm, cast, offset):
    assert_norm_equals_cast(library, norm, (136, 264), CASTS[cast], zero_centered=True, offset=offset)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("rounded", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("cast", ["delayed", "current"])
def test_every_dtype_between_norm_and_cast_is_rounded_to(host_library, dtype, rounded, cast):
    assert_norm_equals_cast(host_library, "layernorm", (40, 72), CASTS[cast], dtype=dtype, rounded=rounded)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("cast", ["delayed", "current"])
@pytest.mark.parametrize("shape", [(600, 2048), (64, 16_384), (2, 16_392)], ids=str)
def test_large_norms_are_the_cast_of_their_own_result(host_library, norm, cast, shape):
    assert_norm_equals_cast(host_library, norm, shape, CASTS[cast])


def activation_operands(activation, shape, dtype=BF16, offset=0):
    """X and a gradient, some of both special."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = 2 * torch.randn(shape[0], shape[1] * (2 if is_gated(activation) else 1), generator=generator)
    grad = torch.randn(shape, generator=generator)
    x.view(-1)[::97], grad.view(-1)[::89] = float("nan"), 0.0
    return placed(x, dtype, offset), placed(grad, dtype, offset)


def assert_activation_equals_cast(library, activation, shape, cast, *, dtype=BF16, rounded=BF16, offset=0):
    x, _ = activation_operands(activation, shape, dtype, offset)
    fp32 = activation_fwd(library, activation, x, out_dtype=torch.float32)
    plain = activation_fwd(library, activation, x, out_dtype=rounded)

    quantized = activation_quantize(library, activation, x, cast, rounded=rounded, offset=offset)

    assert_cast_of(quantized, cast, *between(cast, fp32, plain, amax_of_rounded=False))


def assert_gradient_equals_cast(library, activation, shape, cast, *, dtype=BF16, rounded=BF16, offset=0):
    x, grad = activation_operands(activation, shape, dtype, offset)
    fp32 = activation_bwd(library, activation, grad, x, out_dtype=torch.float32)
    plain = activation_bwd(library, activation, grad, x, out_dtype=rounded)

    quantized, sums = activation_bwd_quantize(
        library, activation, grad, x, cast, rounded=rounded, bias_dtype=rounded, offset=offset
    )

    values, amax_of = between(cast, fp32, plain, amax_of_rounded=False)
    assert_cast_of(quantized, cast, values, amax_of)
    assert same_bytes(sums, bias_grad(library, values, out_dtype=rounded))
    alone, _ = activation_bwd_quantize(library, activation, grad, x, cast, rounded=rounded)
    assert alone.rowwise is None or same_bytes(alone.rowwise, quantized.rowwise)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("shape", [(8, 8), (13, 72), (136, 264), (130, 1101)], ids=str)
def test_an_activations_bytes_are_the_cast_of_its_own_result(host_library, cast, activation, shape):
    assert_activation_equals_cast(host_library, activation, shape, CASTS[cast])
    assert_gradient_equals_cast(host_library, activation, shape, CASTS[cast])


@pytest.mark.parametrize("cast", ["delayed", "current"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_the_cast_of_its_own_result(host_library, cast, activation):
    for dtype in (BF16, torch.float16):
        assert_activation_equals_cast(host_library, activation, (24, 136), CASTS[cast], dtype=dtype)
        assert_gradient_equals_cast(host_library, activation, (24, 136), CASTS[cast], dtype=dtype)


@pytest.mark.parametrize("cast", ["delayed", "current"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("offset", [0, 1])
def test_an_activation_and_its_cast_hold_in_every_order_of_threads(library, cast, activation, offset):
    assert_activation_equals_cast(library, activation, (136, 264), CASTS[cast], offset=offset)
    assert_gradient_equals_cast(library, activation, (136, 264), CASTS[cast], offset=offset)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("rounded", PLAIN_DTYPES, ids=str)
def test_every_dtype_between_activation_and_cast_is_rounded_to(host_library, dtype, rounded):
    assert_activation_equals_cast(host_library, "gelu", (40, 72), CURRENT, dtype=dtype, rounded=rounded)
    assert_gradient_equals_cast(host_library, "gelu", (40, 72), CURRENT, dtype=dtype, rounded=rounded)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", [(1, 7), (13, 72), (136, 264), (130, 1101), (600, 2048)], ids=str)
def test_a_gradient_is_summed_and_cast_from_one_read(host_library, cast, shape):
    _, grad = activation_operands("gelu", shape)
    grad[0, 0] = float("inf")
    chosen = CASTS[cast]

    quantized, sums = bias_grad_quantize(host_library, grad, chosen)

    assert_cast_of(quantized, chosen, grad, grad)
    assert same_bytes(sums, bias_grad(host_library, grad))


@pytest.mark.parametrize("cast", ["delayed", "current"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_summed_gradient_holds_in_every_order_of_threads(host_library, cast, order):
    _, grad = activation_operands("gelu", (136, 264))
    expected = bias_grad(host_library, grad)

    host_library.configure_emulator(*ORDERS[order])
    _, grad = activation_operands("gelu", (136, 264), offset=1)
    quantized, sums = bias_grad_quantize(host_library, grad, CASTS[cast], offset=1)

    assert_cast_of(quantized, CASTS[cast], grad, grad)
    assert same_bytes(sums, expected)


@pytest.mark.parametrize("cast", ["delayed", "current"])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0)], ids=str)
def test_without_elements_there_is_still_a_scale(host_library, cast, shape):
    x, nothing = torch.empty(shape), torch.ones(shape[1])
    chosen = CASTS[cast]
    results = (
        norm_quantize(host_library, "layernorm", x, nothing, nothing, chosen)[0],
        activation_quantize(host_library, "gelu", x, chosen),
        activation_bwd_quantize(host_library, "gelu", x, x, chosen, bias_dtype=torch.float32)[0],
        bias_grad_quantize(host_library, x, chosen)[0],
    )

    for quantized in results:
        assert_cast_of(quantized, chosen, torch.zeros(shape), torch.zeros(1))
    assert (bias_grad_quantize(host_library, x, chosen)[1] == 0.0).all()
