"""LayerNorm and RMSNorm kernels against float64, in every order of threads."""

import numpy as np
import pytest
import torch
from closeness import relative_error
from emulator_orders import ORDERS
from native_cases import PLAIN_DTYPES, same_bytes
from native_ops import NORMS, norm_bwd, norm_fwd

from te_hal.schema.norm import LAYERNORM_BWD, LAYERNORM_FWD

#: Rows in registers of a group and of a block, rows that are too long, odd ones; more rows than blocks.
SHAPES = ((1, 264), (13, 72), (3, 1000), (136, 264), (5, 1032), (2, 2056), (3, 4104), (2, 8200))
LONG = (2, 16_390)
FORWARD, BACKWARD = LAYERNORM_FWD.contract.bound, LAYERNORM_BWD.contract.bound


def operands(shape, dtype, *, weight_dtype=None, offset=0):
    """x, grad, gamma, beta: everyday values, ``offset`` elements off an aligned address."""
    generator = torch.Generator().manual_seed(sum(shape))

    def placed(*size, dtype):
        values = torch.randn(size, generator=generator) + 0.5
        room = torch.empty(values.numel() + offset, dtype=dtype)
        return room[offset:].view(size).copy_(values)

    weight_dtype = weight_dtype or dtype
    gamma, beta = (placed(shape[1], dtype=weight_dtype) for _ in range(2))
    return placed(*shape, dtype=dtype), placed(*shape, dtype=dtype), gamma, beta


def exact_forward(norm, x, gamma, beta, epsilon=1e-5, *, zero_centered=False):
    """(output, mean, rstd) in float64."""
    x, gamma = x.double(), gamma.double() + zero_centered
    mean = x.mean(-1, keepdim=True) if norm == "layernorm" else torch.zeros(len(x), 1)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + epsilon).rsqrt()
    result = (x - mean) * rstd * gamma
    return (result + beta.double() if norm == "layernorm" else result), mean.view(-1), rstd.view(-1)


def exact_backward(norm, grad, x, gamma, beta, *, zero_centered=False):
    """Gradients of x, gamma and beta by autograd in float64."""
    x, gamma, beta = (t.double().requires_grad_() for t in (x, gamma, beta))
    output, mean, rstd = exact_forward(norm, x, gamma, beta, zero_centered=zero_centered)
    output.backward(grad.double())
    return x.grad, gamma.grad, beta.grad, mean.detach().float(), rstd.detach().float()


def forward(library, norm, x, gamma, beta, **options):
    return norm_fwd(library, norm, x, gamma, beta if norm == "layernorm" else None, **options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(1, 1), *SHAPES, LONG], ids=str)
def test_the_forward_is_within_its_bound_of_float64(library, norm, shape):
    x, _, gamma, beta = operands(shape, torch.bfloat16)
    exact, exact_mean, exact_rstd = exact_forward(norm, x, gamma, beta)

    output, mean, rstd = forward(library, norm, x, gamma, beta, out_dtype=torch.float32)

    assert relative_error(output, exact) <= FORWARD[torch.float32]
    np.testing.assert_array_max_ulp(rstd.numpy(), exact_rstd.float().numpy(), maxulp=2)
    if norm == "layernorm":
        assert (mean - exact_mean).abs().max() <= 1e-6


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [*SHAPES, LONG], ids=str)
def test_the_backward_is_within_its_bound_of_float64(library, norm, shape):
    x, grad, gamma, beta = operands(shape, torch.float32)
    *exact, mean, rstd = exact_backward(norm, grad, x, gamma, beta)

    found = norm_bwd(library, norm, grad, x, mean if norm == "layernorm" else None, rstd, gamma)

    for got, expected in zip(found, exact, strict=True):
        assert got is None or relative_error(got, expected) <= BACKWARD[torch.float32]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", PLAIN_DTYPES, ids=str)
def test_every_pairing_of_dtypes_rounds_once(host_library, norm, zero_centered, dtype, weight_dtype):
    x, grad, gamma, beta = operands((40, 264), dtype, weight_dtype=weight_dtype)
    exact, *_ = exact_forward(norm, x, gamma, beta, zero_centered=zero_centered)
    *exact_grads, mean, rstd = exact_backward(norm, grad, x, gamma, beta, zero_centered=zero_centered)

    output, *_ = forward(host_library, norm, x, gamma, beta, zero_centered=zero_centered)
    mean = mean if norm == "layernorm" else None
    grads = norm_bwd(host_library, norm, grad, x, mean, rstd, gamma, zero_centered=zero_centered)

    assert relative_error(output, exact) <= FORWARD[dtype]
    for got, expected, bound in zip(grads, exact_grads, (dtype, weight_dtype, weight_dtype), strict=True):
        assert got is None or relative_error(got, expected) <= BACKWARD[bound]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(13, 72), (9, 1032), (3, 4104), LONG], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_bytes_do_not_depend_on_addresses_and_orders(host_library, norm, shape, order):
    x, grad, gamma, beta = operands(shape, torch.bfloat16)
    *_, mean, rstd = exact_backward(norm, grad, x, gamma, beta)
    mean = mean if norm == "layernorm" else None
    expected = forward(host_library, norm, x, gamma, beta, out_dtype=torch.float32)
    expected_grads = norm_bwd(host_library, norm, grad, x, mean, rstd, gamma)

    host_library.configure_emulator(*ORDERS[order])
    x, grad, gamma, beta = operands(shape, torch.bfloat16, offset=1)
    found = forward(host_library, norm, x, gamma, beta, out_dtype=torch.float32, offset=1)
    grads = norm_bwd(host_library, norm, grad, x, mean, rstd, gamma, offset=1)

    for got, wanted in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        assert got is None or same_bytes(got, wanted)


@pytest.mark.parametrize("norm", NORMS)
def test_a_nan_or_infinity_stays_in_its_row(host_library, norm):
    x, _, gamma, beta = operands((5, 264), torch.bfloat16)
    clean, *_ = forward(host_library, norm, x, gamma, beta)
    x[1, 3], x[3, 263] = float("nan"), float("inf")

    output, _, rstd = forward(host_library, norm, x, gamma, beta)

    assert output[1].isnan().all()
    assert output[3].isnan().any()
    assert rstd[[1, 3]].isfinite().tolist() == [False, False] or rstd[3] == 0.0
    assert same_bytes(output[::2], clean[::2])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cols", [8, 1, 1030])
def test_a_row_of_zeros_has_the_root_of_epsilon(host_library, norm, cols):
    x, gamma, beta = torch.zeros(3, cols), torch.ones(cols), torch.full((cols,), 2.0)

    output, _, rstd = forward(host_library, norm, x, gamma, beta, epsilon=0.25)

    assert (rstd == 2.0).all()
    assert (output == (2.0 if norm == "layernorm" else 0.0)).all()


@pytest.mark.parametrize("norm", NORMS)
def test_without_columns_there_are_still_statistics(host_library, norm):
    x, nothing = torch.empty(3, 0), torch.empty(0)

    _, mean, rstd = forward(host_library, norm, x, nothing, nothing, epsilon=0.25)

    assert (rstd == 2.0).all()
    assert mean is None or (mean == 0.0).all()


@pytest.mark.parametrize("norm", NORMS)
def test_without_rows_the_weights_gradients_are_zero(host_library, norm):
    x, gamma, nothing = torch.empty(0, 264), torch.ones(264), torch.empty(0)
    mean = nothing if norm == "layernorm" else None

    _, grad_gamma, grad_beta = norm_bwd(host_library, norm, x, x, mean, nothing, gamma)

    assert (grad_gamma == 0.0).all()
    assert grad_beta is None or (grad_beta == 0.0).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(600, 2048), (64, 16_384)], ids=str)
def test_large_shapes_are_right(host_library, norm, shape):
    x, grad, gamma, beta = operands(shape, torch.bfloat16)
    exact, *_ = exact_forward(norm, x, gamma, beta)
    *exact_grads, mean, rstd = exact_backward(norm, grad, x, gamma, beta)

    output, *_ = forward(host_library, norm, x, gamma, beta)
    grads = norm_bwd(host_library, norm, grad, x, mean if norm == "layernorm" else None, rstd, gamma)

    for got, expected in zip((output, *grads), (exact, *exact_grads), strict=True):
        assert got is None or relative_error(got, expected) <= BACKWARD[torch.bfloat16]
