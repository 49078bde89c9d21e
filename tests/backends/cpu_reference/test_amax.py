"""amax and compute_scale against recorded values, a loop over Python floats, and the vectors of docs/numerics.md.

Cases B04 (pytorch/ao#4713), B07 (flagos-ai/TransformerEngine-FL#110) and B31 (NVIDIA/TransformerEngine#534): what they
say about these two ops.
"""

from __future__ import annotations

import math
import struct

import golden_values
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_hal.backends.cpu_reference.amax import amax, compute_scale
from te_hal.schema.formats import E4M3, E5M2, FLOAT32_MAX

INF, NAN = math.inf, math.nan
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
RECORDED = golden_values.load("quantizers")

AMAX_VECTORS = {
    "negative dominates": ([-5.0, -5.0, 0.1], 5.0),
    "nan is ignored": ([NAN, -2.0], 2.0),
    "negative nan is ignored": ([-NAN, 1.0], 1.0),
    "inf is not ignored": ([1.0, INF, -3.0], INF),
    "nan beside inf": ([NAN, -INF, 1.0], INF),
    "only nan": ([NAN, NAN], 0.0),
    "negative zero": ([-0.0, -0.0], 0.0),
    "empty": ([], 0.0),
}
SCALE_VECTORS = {
    "plain": ({}, [1.0, 1.0, 1.0, FLOAT32_MAX, FLOAT32_MAX, 149.33333]),
    "power of 2": ({"power_of_2": True}, [1.0, 1.0, 1.0, 2.0**127, 2.0**127, 128.0]),
    "epsilon 4": ({"epsilon": 4.0}, [112.0, 1.0, 1.0, 112.0, 112.0, 112.0]),
    "value for inf": ({"value_for_inf": 65504.0}, [1.0, 1.0, 1.0, 65504.0, 65504.0, 149.33333]),
}
SCALED_AMAXES = [0.0, NAN, INF, 1e-40, 1e-37, 3.0]


def fp32(value: float) -> float:
    """The fp32 number nearest to a Python float; what is too large becomes infinite."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(INF, value)


def scale_by_hand(amax: float, fp8_max: float, epsilon: float, power_of_2: bool, value_for_inf: float) -> float:
    if amax < epsilon:
        amax = fp32(epsilon)
    if amax == 0.0 or math.isinf(amax) or math.isnan(amax):
        scale = 1.0
    else:
        scale = fp32(fp8_max / amax)
        scale = fp32(value_for_inf) if math.isinf(scale) else scale
    return 2.0 ** (math.frexp(scale)[1] - 1) if power_of_2 else scale


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("elements", "expected"), AMAX_VECTORS.values(), ids=AMAX_VECTORS)
def test_amax_is_the_largest_magnitude_without_nan(elements: list[float], expected: float, dtype: torch.dtype) -> None:
    found = amax(torch.tensor(elements, dtype=dtype))
    assert found.shape == (1,)
    assert found.dtype == torch.float32
    assert found.item() == torch.tensor(expected, dtype=dtype).item()
    assert not found.signbit().item()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_anywhere_leaves_the_amax_of_the_rest(dtype: torch.dtype) -> None:
    values = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = np.abs(values.float().numpy()).max()
    for position in (0, 299, 1000, 2099):
        spoiled = values.clone()
        spoiled.view(-1)[position] = NAN
        rest = np.delete(values.float().numpy().ravel(), position)
        assert amax(spoiled).item() == np.abs(rest).max()
    assert amax(values).item() == expected


@pytest.mark.parametrize("case", RECORDED.cases("delayed/") + RECORDED.cases("special/"))
def test_amax_equals_what_was_recorded(case: str) -> None:
    values = RECORDED.case(case)
    assert torch.equal(amax(values["x"]), values["amax"])


def test_out_keeps_what_is_larger_and_is_returned() -> None:
    out = torch.tensor([2.0])
    assert amax(torch.tensor([-1.0, 1.5]), out=out) is out
    assert out.item() == 2.0
    amax(torch.tensor([-3.0]), out=out)
    assert out.item() == 3.0
    amax(torch.empty(0), out=out)
    amax(torch.tensor([NAN]), out=out)
    assert out.item() == 3.0


def test_out_may_be_a_view_into_a_history_and_nothing_else_is_written() -> None:
    history = torch.zeros(4, 3)
    amax(torch.tensor([-3.0]), out=history[0][1])
    assert history.nonzero().tolist() == [[0, 1]]


def test_a_nan_in_the_running_amax_gives_way() -> None:
    out = torch.tensor([NAN])
    assert amax(torch.tensor([2.0]), out=out).item() == 2.0


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 4), (4, 0)], ids=str)
def test_any_rank_and_stride_gives_the_same(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    expected = max((abs(v) for v in values.flatten().tolist()), default=0.0)
    turned = values.permute(tuple(reversed(range(values.dim()))))
    assert amax(values).item() == amax(turned).item() == expected


def test_amax_of_a_tensor_that_requires_grad_carries_none() -> None:
    assert not amax(torch.randn(4, requires_grad=True)).requires_grad


@pytest.mark.parametrize(("options", "expected"), SCALE_VECTORS.values(), ids=SCALE_VECTORS)
def test_scale_of_the_written_vectors(options: dict[str, float], expected: list[float]) -> None:
    """Case B07 (flagos-ai/TransformerEngine-FL#110), with a subnormal amax added."""
    scale = compute_scale(torch.tensor(SCALED_AMAXES), fp8_max=448.0, **options)
    assert scale.tolist() == [fp32(value) for value in expected]


def test_an_amax_that_is_zero_gives_scale_one() -> None:
    """Case B04 (pytorch/ao#4713), its numeric part: no division by zero follows from a tensor of zeros."""
    for fp8_max in (448.0, 57344.0):
        assert compute_scale(torch.tensor([0.0, -0.0]), fp8_max=fp8_max).tolist() == [1.0, 1.0]


def test_a_subnormal_amax_is_not_zero_even_where_subnormals_are_flushed() -> None:
    amaxes = torch.tensor([1e-40, 1.4e-45, 0.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        scale = compute_scale(amaxes, fp8_max=448.0)
    finally:
        torch.set_flush_denormal(False)
    assert scale.tolist() == [FLOAT32_MAX, FLOAT32_MAX, 1.0]


AMAXES = st.floats(min_value=0.0, width=32) | st.just(NAN)


@settings(deadline=None)
@given(
    amaxes=st.lists(AMAXES, min_size=1, max_size=40),
    fp8_max=st.sampled_from([448.0, 57344.0]),
    epsilon=st.sampled_from([0.0, 1e-40, 1e-12, 0.01, 4.0]),
    power_of_2=st.booleans(),
    value_for_inf=st.sampled_from([FLOAT32_MAX, 65504.0]),
)
def test_scale_equals_a_loop_over_python_floats(
    amaxes: list[float], fp8_max: float, epsilon: float, power_of_2: bool, value_for_inf: float
) -> None:
    found = compute_scale(
        torch.tensor(amaxes), fp8_max=fp8_max, epsilon=epsilon, power_of_2=power_of_2, value_for_inf=value_for_inf
    )
    expected = [scale_by_hand(amax, fp8_max, fp32(epsilon), power_of_2, value_for_inf) for amax in amaxes]
    assert found.tolist() == expected


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
def test_the_quotient_is_one_ieee_division(format: object) -> None:
    """``448.0 / t`` is not; numpy's division is."""
    amaxes = torch.rand(100_000, generator=torch.Generator().manual_seed(3)) * 100
    expected = np.float32(format.max) / amaxes.numpy()
    assert np.array_equal(compute_scale(amaxes, fp8_max=format.max).numpy(), expected)
    assert not np.array_equal((format.max / amaxes).numpy(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,)], ids=str)
def test_scale_has_the_shape_of_amax_and_is_fp32_under_any_default_dtype(shape: tuple[int, ...]) -> None:
    amaxes = torch.full(shape, 3.0, dtype=torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        scale = compute_scale(amaxes, fp8_max=448.0, epsilon=0.5, power_of_2=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.shape == shape
    assert scale.dtype == torch.float32
