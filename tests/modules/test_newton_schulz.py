"""newton_schulz against singular values in float64."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error

import te_hal.modules as te

SHAPES = pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8), (1, 5)], ids=str)
STEPS = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]
STEPS += [(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return made / made.norm()


def by_singular_values(x: torch.Tensor, steps: list[tuple[float, float, float]]) -> torch.Tensor:
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_five_steps_are_their_polynomials_of_the_singular_values_rounded_once(shape, dtype):
    x = matrix(shape).to(dtype)
    exact = by_singular_values(x, STEPS)
    assert te.newton_schulz(x) is None
    assert relative_error(x, exact) <= (1e-5 if dtype is torch.float32 else 2**-8)


@SHAPES
def test_many_steps_give_the_nearest_orthogonal_matrix(shape):
    x = matrix(shape)
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    te.newton_schulz(x, num_iterations=30)
    assert relative_error(x, u @ v) <= 1e-5


def test_coefficients_of_ones_own_and_a_view_that_is_written_in_place():
    whole = torch.zeros(6, 10)
    x = whole[:, ::2]
    x.copy_(matrix((6, 5)))
    exact = by_singular_values(x, [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)])
    te.newton_schulz(x, num_iterations=2, coefficients=[2.0, -1.5, 0.5, 1.5, -0.5, 0.0])
    assert relative_error(whole[:, ::2], exact) <= 1e-5
    assert not whole[:, 1::2].any()


WRONG = {
    "rank": ((torch.zeros(3),), {}, ValueError, r"x: got shape \(3,\)"),
    "dtype": ((torch.zeros(3, 3).double(),), {}, ValueError, "float64"),
    "none": ((None,), {}, TypeError, "newton_schulz: x"),
    "steps": ((torch.zeros(3, 3),), {"num_iterations": 0}, ValueError, "num_iterations: got 0"),
    "coefficients": ((torch.zeros(3, 3),), {"coefficients": [1.0]}, ValueError, "got 1 of them; accepted: 15"),
    "context": ((torch.zeros(3, 3), object()), {}, NotImplementedError, "ctx: got .*gather them, and pass the whole"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_by_name(case):
    given, named, error, said = WRONG[case]
    with pytest.raises(error, match=said):
        te.newton_schulz(*given, **named)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("CusolverMpCtx", "NVIDIA's own library"),
        ("FusedMLAQUpProjRopeQuant", "one kernel for NVIDIA's Blackwell"),
        ("ManualOffloadSynchronizer", "get_cpu_offload_context moves by itself"),
        ("initialize_ub", "communication of tensor parallelism"),
        ("destroy_ub", "belongs to initialize_ub"),
        ("UserBufferQuantizationMode", "belongs to initialize_ub"),
    ],
)
def test_a_name_of_transformer_engine_that_is_refused_says_why(name, why):
    with pytest.raises(NotImplementedError, match=why):
        getattr(te, name)
    assert not hasattr(te, name)
