"""Activations as compositions: against torch's autograd in float64, and recorded values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import golden_values
import pytest
import torch
from activation_reference import in_plain_torch
from closeness import relative_error

from te_hal import ops
from te_hal.schema.activation import ACTIVATION_FWD, ACTIVATIONS, GATED
from te_hal.schema.formats import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED = golden_values.load("functional")
BOUND = ACTIVATION_FWD.contract.bound


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_backward_keep_their_bounds(activation: str, dtype: torch.dtype) -> None:
    x = (draw(4, 32, 128) * 3).to(dtype)
    leaf = x.double().requires_grad_()
    expected = in_plain_torch(activation, leaf)
    grad = draw(*expected.shape, seed=1).to(dtype)
    expected.backward(grad.double())
    assert leaf.grad is not None
    for out_dtype in (None, torch.float32):
        result = ops.activation_fwd(x, activation=activation, out_dtype=out_dtype)
        grad_input = ops.activation_bwd(grad, x, activation=activation, out_dtype=out_dtype)
        assert result.dtype == grad_input.dtype == (out_dtype or dtype)
        assert grad_input.shape == x.shape
        assert relative_error(result, expected.detach()) <= BOUND[result.dtype]
        assert relative_error(grad_input, leaf.grad) <= BOUND[result.dtype]


@pytest.mark.parametrize("case", RECORDED.cases("act/"))
def test_matches_the_recorded_values(case: str) -> None:
    recorded, activation = RECORDED.case(case), case.split("/")[1]
    bound = 1e-4 if case.endswith("bfloat16") else 1e-6
    assert relative_error(ops.activation_fwd(recorded["x"], activation=activation), recorded["y"]) <= bound
    grad_input = ops.activation_bwd(recorded["gy"], recorded["x"], activation=activation)
    assert relative_error(grad_input, recorded["gx"]) <= bound


@pytest.mark.parametrize("activation", GATED)
def test_the_first_half_is_activated_and_the_second_multiplies(activation: str) -> None:
    gate, linear = draw(3, 8), torch.zeros(3, 8)
    zero = 0.0 if activation != "clamped_swiglu" else -1.0  # its offset of 1 is added to the second half
    result = ops.activation_fwd(torch.cat([gate, linear + zero], -1), activation=activation)
    assert torch.equal(result, torch.zeros(3, 8))


def test_clamped_swiglu_takes_its_parameters() -> None:
    x, grad = draw(16, 64) * 3, draw(16, 32, seed=1)
    parameters = {"limit": 2.0, "alpha": 0.5, "glu_linear_offset": -0.25}
    leaf = x.double().requires_grad_()
    a, b = leaf.chunk(2, -1)
    a = a.clamp(max=2.0)
    expected = a * torch.sigmoid(0.5 * a) * (b.clamp(-2.0, 2.0) - 0.25)
    expected.backward(grad.double())
    result = ops.activation_fwd(x, activation="clamped_swiglu", **parameters)
    grad_input = ops.activation_bwd(grad, x, activation="clamped_swiglu", **parameters)
    assert leaf.grad is not None
    # fp32 against float64: a handful of roundings of 6e-8.
    assert relative_error(result, expected.detach()) <= 1e-6
    assert relative_error(grad_input, leaf.grad) <= 1e-6


@pytest.mark.parametrize(
    ("gate", "linear", "gate_passes", "linear_passes"),
    [
        pytest.param(1.0, 1.0, True, True, id="inside"),
        pytest.param(7.0, 1.0, True, True, id="gate at its limit"),
        pytest.param(7.5, 1.0, False, True, id="gate above"),
        pytest.param(-7.5, 1.0, True, True, id="gate has no lower limit"),
        pytest.param(1.0, 7.0, True, True, id="linear at its upper limit"),
        pytest.param(1.0, -7.0, True, True, id="linear at its lower limit"),
        pytest.param(1.0, 7.5, True, False, id="linear above"),
        pytest.param(1.0, -7.5, True, False, id="linear below"),
    ],
)
def test_a_clamp_lets_the_gradient_through_up_to_its_edge(
    gate: float, linear: float, gate_passes: bool, linear_passes: bool
) -> None:
    """As torch.clamp's own gradient does."""
    x = torch.tensor([gate, linear])
    grad_input = ops.activation_bwd(torch.ones(1), x, activation="clamped_swiglu")
    assert torch.equal(grad_input != 0.0, torch.tensor([gate_passes, linear_passes]))


def test_parameters_of_clamped_swiglu_are_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="clamped_swiglu"):
        ops.activation_fwd(torch.ones(2, 4), activation="swiglu", limit=1.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan_and_large_inputs_stay_finite(activation: str) -> None:
    width = 2 if activation in GATED else 1
    poisoned = torch.full((1, width), float("nan"))
    assert ops.activation_fwd(poisoned, activation=activation).isnan().all()
    assert ops.activation_bwd(torch.ones(1, 1), poisoned, activation=activation).isnan().all()
    magnitude = 1e8 if activation in ("srelu", "sreglu", "geglu", "reglu", "qgeglu", "swiglu") else 1e30
    for sign in (1.0, -1.0):
        large = torch.full((1, width), sign * magnitude)
        assert ops.activation_fwd(large, activation=activation).isfinite().all()
        assert ops.activation_bwd(torch.ones(1, 1), large, activation=activation).isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (8,), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "clamped_swiglu"])
def test_empty_and_one_dimensional_inputs_work(activation: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    output = ops.activation_fwd(x, activation=activation)
    assert output.shape == (*shape[:-1], shape[-1] // (2 if activation in GATED else 1))
    assert ops.activation_bwd(output, x, activation=activation).shape == shape


def test_an_odd_last_size_is_refused_for_gated_kinds() -> None:
    with pytest.raises(ValueError, match=r"activation_fwd.*\(2, 5\)"):
        ops.activation_fwd(torch.ones(2, 5), activation="swiglu")


def test_memory_order_does_not_matter_and_the_caller_keeps_its_tensors() -> None:
    x, grad = draw(64, 16), draw(16, 32, seed=1)
    before = x.clone(), grad.clone()
    strided = x.t()
    assert torch.equal(
        ops.activation_fwd(strided, activation="geglu"), ops.activation_fwd(strided.contiguous(), activation="geglu")
    )
    ops.activation_bwd(grad, strided, activation="geglu")
    assert torch.equal(x, before[0])
    assert torch.equal(grad, before[1])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With several, torch itself cuts a whole tensor where vectors end, and the last bits there differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 333, 200), (96, 4000), (2, 200_000), (400_000,)], ids=str)
def test_with_one_thread_going_through_large_tensors_in_pieces_changes_no_bit(
    activation: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compared with the same formulas on the whole: what they compute is held elsewhere.
    x = draw(*shape) * 3
    grad = draw(*shape[:-1], shape[-1] // (2 if activation in GATED else 1), seed=1)
    results = []
    for piece in (1 << 17, 1 << 40):
        monkeypatch.setattr("te_hal.ops.pieces.PIECE", piece)
        results.append(
            (ops.activation_fwd(x, activation=activation), ops.activation_bwd(grad, x, activation=activation))
        )
    assert all(map(torch.equal, *results))
