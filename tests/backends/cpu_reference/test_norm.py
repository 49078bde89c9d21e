"""LayerNorm and RMSNorm of cpu_reference against float64, plain torch and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from closeness import FP32_ROUNDING, half_step, relative_error, roundings
from hypothesis import given, settings
from hypothesis import strategies as st

from te_hal.backends.cpu_reference.chunks import CHUNK
from te_hal.backends.cpu_reference.norm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from te_hal.schema.formats import FLOATS
from te_hal.schema.norm import LAYERNORM_BWD, LAYERNORM_FWD

NORMS = ("layernorm", "rmsnorm")
FORWARD, BACKWARD = LAYERNORM_FWD.contract.bound, LAYERNORM_BWD.contract.bound
EPSILON = 1e-5


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_forward(norm: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **flags: object) -> torch.Tensor:
    if norm == "layernorm":
        return layernorm_fwd(x, weight, bias, **flags)[0]
    return rmsnorm_fwd(x, weight, **flags)[0]


def run_backward(
    norm: str, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **flags: bool
) -> tuple[torch.Tensor, ...]:
    if norm == "layernorm":
        _, mean, rstd = layernorm_fwd(x, weight, bias, **flags)
        return layernorm_bwd(grad, x, mean, rstd, weight, **flags)
    return rmsnorm_bwd(grad, x, rmsnorm_fwd(x, weight, **flags)[1], weight, **flags)


def exact(
    norm: str, grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result and the gradients of input, gamma (and beta) by torch's autograd in float64."""
    leaves = [t.double().requires_grad_() for t in (x, gamma, beta)[: 3 if norm == "layernorm" else 2]]
    if norm == "layernorm":
        result = torch.nn.functional.layer_norm(leaves[0], x.shape[-1:], leaves[1], leaves[2], EPSILON)
    else:
        mean_square = leaves[0].square().mean(-1, keepdim=True)
        result = leaves[0] / (mean_square + EPSILON).sqrt() * leaves[1]
    result.backward(grad.double())
    return result.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("shape", [(64, 7), (3, 5, 128), (300, 1024), (2, 4096)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_forward_and_backward_keep_their_bounds(norm: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, grad = (draw(*shape, seed=1) * 3 + 1).to(dtype), draw(*shape, seed=2).to(dtype)
    gamma, beta = draw(shape[-1], seed=3).to(dtype), draw(shape[-1], seed=4).to(dtype)
    expected, expected_grads = exact(norm, grad, x, gamma, beta)
    result = run_forward(norm, x, gamma, beta)
    assert result.dtype == dtype
    assert relative_error(result, expected) <= FORWARD[dtype]
    assert relative_error(run_forward(norm, x, gamma, beta, out_dtype=torch.float32), expected) <= 1e-6
    grads = run_backward(norm, grad, x, gamma, beta)
    assert relative_error(grads[0], expected_grads[0]) <= BACKWARD[dtype]
    for found, wanted in zip(grads[1:], expected_grads[1:], strict=True):
        assert found.dtype == dtype
        assert roundings(found, wanted, 64 * FP32_ROUNDING * (grad.double().abs().sum() / shape[-1]).expand(1)) <= 1.0


@settings(deadline=None, max_examples=40)
@given(
    norm=st.sampled_from(NORMS),
    leading=st.lists(st.integers(1, 4), max_size=3),
    hidden=st.integers(1, 33),
    dtypes=st.tuples(*[st.sampled_from(FLOATS)] * 3),
    zero_centered=st.booleans(),
)
def test_each_result_is_rounded_once(
    norm: str, leading: list[int], hidden: int, dtypes: tuple[torch.dtype, ...], zero_centered: bool
) -> None:
    x, weight, bias = (
        draw(*leading, hidden, seed=1).to(dtypes[0]),
        draw(hidden, seed=2).to(dtypes[1]),
        draw(hidden, seed=3).to(dtypes[1]),
    )
    gamma = weight.double() + (1.0 if zero_centered else 0.0)
    expected, _ = exact(norm, torch.ones_like(x), x, gamma, bias)
    largest = expected.abs().max() + bias.double().abs().max()
    # A row whose spread is far below its mean passes the mean's own rounding on, magnified.
    spread = x.double().std(-1, correction=0).min() if norm == "layernorm" else torch.tensor(1.0)
    magnified = 1.0 + x.double().abs().max() / (spread + EPSILON**0.5)
    result = run_forward(norm, x, weight, bias, zero_centered_gamma=zero_centered, out_dtype=dtypes[2])
    assert result.shape == x.shape
    assert roundings(result, expected, (8 * FP32_ROUNDING * largest * magnified).expand(1)) <= 1.0


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm_is_fp32_normalise_fp32_gamma_one_cast(zero_centered: bool) -> None:
    """B17: bit-equal, with an outlier of 1e3 in the row."""
    x, weight = draw(5, 4096).bfloat16(), draw(4096, seed=1).bfloat16()
    x[2, 77] = 1e3
    values = x.float()
    mean_square = values.square().mean(-1, keepdim=True)
    rstd = torch.from_numpy((1.0 / np.sqrt((mean_square + EPSILON).numpy().astype(np.float64))).astype(np.float32))
    gamma = weight.float() + 1.0 if zero_centered else weight.float()
    expected = (values * rstd * gamma).bfloat16()
    result, found_rstd = rmsnorm_fwd(x, weight, zero_centered_gamma=zero_centered)
    assert torch.equal(found_rstd, rstd.squeeze(-1))
    assert torch.equal(result, expected)


def test_hugging_faces_order_of_casts_is_another_one() -> None:
    """B17: rounding before gamma changes about a quarter of the results, each by one bf16 step."""
    x, weight = draw(5, 4096).bfloat16(), draw(4096, seed=1).bfloat16()
    result, rstd = rmsnorm_fwd(x, weight)
    hugging_face = weight * (x.float() * rstd.unsqueeze(-1)).bfloat16()
    different = result != hugging_face
    assert 0.2 < different.double().mean() < 0.3
    steps = (result.double() - hugging_face.double()).abs() / (2 * half_step(result, torch.bfloat16))
    assert steps.max() == 1.0


@pytest.mark.parametrize("norm", NORMS)
def test_the_one_of_a_zero_centered_gamma_is_added_in_fp32(norm: str) -> None:
    x, weight, bias = draw(4, 64), torch.full((64,), 2.0**-10, dtype=torch.bfloat16), draw(64, seed=1)
    gamma = torch.full((64,), 1.0 + 2.0**-10)  # bf16 has no such number
    centered = run_forward(norm, x, weight, bias, zero_centered_gamma=True)
    assert torch.equal(centered, run_forward(norm, x, gamma, bias))
    grads = run_backward(norm, x, x, weight, bias, zero_centered_gamma=True)
    for found, wanted in zip(grads, run_backward(norm, x, x, gamma, bias), strict=True):
        assert torch.equal(found, wanted.to(found.dtype))


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_take_the_dtype_of_what_they_belong_to(norm: str) -> None:
    x, weight = draw(4, 16).half(), draw(16, seed=1).bfloat16()
    grads = run_backward(norm, draw(4, 16, seed=2), x, weight, weight)
    assert [g.dtype for g in grads] == [torch.float16] + [torch.bfloat16] * (len(grads) - 1)


@pytest.mark.parametrize("shape", [(16,), (2, 3, 16), (0, 16), (2, 0, 16), (3, 0), (0, 0)], ids=str)
def test_statistics_have_the_leading_shape(shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), torch.ones(shape[-1])
    output, mean, rstd = layernorm_fwd(x, weight, weight)
    assert output.shape == x.shape
    assert mean.shape == rstd.shape == rmsnorm_fwd(x, weight)[1].shape == x.shape[:-1]
    assert not torch.cat([mean.flatten(), rstd.flatten()]).isnan().any()
    for grads in (layernorm_bwd(x, x, mean, rstd, weight), rmsnorm_bwd(x, x, rstd, weight)):
        assert grads[0].shape == x.shape
        assert all(g.shape == weight.shape for g in grads[1:])


def test_parameters_of_an_empty_batch_have_zero_gradients() -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    _, grad_weight, grad_bias = layernorm_bwd(x, x, torch.empty(0), torch.empty(0), weight)
    assert torch.equal(grad_weight, torch.zeros(8))
    assert torch.equal(grad_bias, torch.zeros(8))


def test_a_constant_row_gives_beta_and_a_zero_row_stays_zero() -> None:
    weight, beta = draw(32).bfloat16(), draw(32, seed=1).bfloat16()
    x = torch.stack([torch.full((32,), 5.0), torch.zeros(32)]).bfloat16()
    output, _, rstd = layernorm_fwd(x, weight, beta)
    assert torch.equal(output, beta.expand(2, 32))
    assert torch.equal(rstd, torch.full((2,), np.float32(1.0 / np.sqrt(np.float64(np.float32(EPSILON))))))
    assert torch.equal(rmsnorm_fwd(x, weight)[0][1], torch.zeros(32).bfloat16())
    grads = rmsnorm_bwd(torch.ones_like(x), x, rmsnorm_fwd(x, weight)[1], weight)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("norm", NORMS)
def test_nan_stays_in_its_row(norm: str) -> None:
    x = draw(3, 8)
    x[1, 4] = float("nan")
    result = run_forward(norm, x, torch.ones(8), torch.zeros(8))
    assert torch.equal(result.isnan().any(-1), torch.tensor([False, True, False]))
    assert result[1].isnan().all()


@pytest.mark.parametrize("norm", NORMS)
def test_memory_order_and_pieces_do_not_matter(norm: str) -> None:
    rows = 3 * CHUNK // 512 + 5
    x, weight = draw(512, rows).t().bfloat16(), draw(512, seed=1)
    assert not x.is_contiguous()
    result = run_forward(norm, x, weight, weight)
    tail = run_forward(norm, x[-5:].contiguous(), weight, weight)
    assert torch.equal(result[-5:], tail)
    grads = run_backward(norm, x, x, weight, weight)
    for found, wanted in zip(grads, exact(norm, x, x, weight, weight)[1], strict=True):
        assert relative_error(found, wanted) <= BACKWARD[found.dtype]
