"""Activation kernels against float64 formulas, and their special values against the composition of the op."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from closeness import relative_error
from emulator_orders import ORDERS
from native_cases import PLAIN_DTYPES, same_bytes
from native_ops import activation_bwd, activation_fwd, is_gated

from te_hal import ops
from te_hal.schema.activation import ACTIVATION_FWD, ACTIVATIONS

BOUND = ACTIVATION_FWD.contract.bound
#: Results' shapes: one element, odd, rows shorter and longer than a chunk of a block.
SHAPES = ((1, 1), (8, 8), (13, 72), (136, 264), (5, 1001), (2, 9000))
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 100.0, -100.0, 7.0, -7.0, 7.01, -7.01)
PARAMETERS = (3.0, 1.5, 0.25)

UNGATED = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": F.silu,
}
GATES = UNGATED | {"sigmoid": torch.sigmoid}
GATED = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
}


def exact(activation, x, parameters=(7.0, 1.702, 1.0)):
    """In x's dtype, float64 here."""
    if activation in UNGATED:
        return UNGATED[activation](x)
    gate, linear = x.chunk(2, -1)
    if activation in GATED:
        return GATES[GATED[activation]](gate) * linear
    limit, alpha, offset = parameters
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + offset)


def operands(activation, shape, dtype, *, grad_dtype=None, offset=0):
    """x, and a gradient of the output; ``offset`` elements off an aligned address."""
    generator = torch.Generator().manual_seed(sum(shape))

    def placed(rows, cols, dtype):
        room = torch.empty(rows * cols + offset, dtype=dtype)
        return room[offset:].view(rows, cols).copy_(2 * torch.randn(rows, cols, generator=generator))

    cols = shape[1] * (2 if is_gated(activation) else 1)
    return placed(shape[0], cols, dtype), placed(*shape, grad_dtype or dtype)


def exact_gradient(activation, grad, x, parameters=(7.0, 1.702, 1.0)):
    x = x.double().requires_grad_()
    exact(activation, x, parameters).backward(grad.double())
    return x.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_both_passes_are_within_their_bound_of_float64(library, activation, shape):
    x, grad = operands(activation, shape, torch.bfloat16)

    output = activation_fwd(library, activation, x, out_dtype=torch.float32)
    grad_input = activation_bwd(library, activation, grad, x, out_dtype=torch.float32)

    assert relative_error(output, exact(activation, x.double())) <= BOUND[torch.float32]
    assert relative_error(grad_input, exact_gradient(activation, grad, x)) <= BOUND[torch.float32]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("other", PLAIN_DTYPES, ids=str)
def test_every_kind_and_pairing_of_dtypes_rounds_once(host_library, activation, dtype, other):
    x, grad = operands(activation, (40, 72), dtype, grad_dtype=other)

    output = activation_fwd(host_library, activation, x, out_dtype=other)
    grad_input = activation_bwd(host_library, activation, grad, x, out_dtype=dtype)

    assert relative_error(output, exact(activation, x.double())) <= BOUND[other]
    assert relative_error(grad_input, exact_gradient(activation, grad, x)) <= BOUND[dtype]


def test_clamped_swiglu_takes_its_parameters(host_library):
    x, grad = operands("clamped_swiglu", (13, 72), torch.float32)

    output = activation_fwd(host_library, "clamped_swiglu", x, parameters=PARAMETERS)
    grad_input = activation_bwd(host_library, "clamped_swiglu", grad, x, parameters=PARAMETERS)

    assert relative_error(output, exact("clamped_swiglu", x.double(), PARAMETERS)) <= BOUND[torch.float32]
    expected = exact_gradient("clamped_swiglu", grad, x, PARAMETERS)
    assert relative_error(grad_input, expected) <= BOUND[torch.float32]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_give_what_the_composition_gives(host_library, activation):
    x = torch.tensor([SPECIAL])
    if is_gated(activation):  # one half at a time: a tail that one formula flushes, times infinity, would be NaN
        x = torch.tensor([(*SPECIAL, *[1.5] * len(SPECIAL)), (*[0.5] * len(SPECIAL), *SPECIAL)])
    grad = torch.full((len(x), len(SPECIAL)), 0.5)
    flags = {"activation": activation, "out_dtype": torch.float32}

    pairs = (
        (activation_fwd(host_library, activation, x), ops.activation_fwd(x, **flags)),
        (activation_bwd(host_library, activation, grad, x), ops.activation_bwd(grad, x, **flags)),
    )

    for got, expected in pairs:
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.isinf(), expected.isinf())
        ordinary = expected.isfinite()
        torch.testing.assert_close(got[ordinary], expected[ordinary], rtol=1e-5, atol=1e-6)


def one_nan(values):
    """NaN as kernels write it; torch's conversion to bf16 leaves several."""
    return values.where(~values.isnan(), float("nan"))


@pytest.mark.parametrize("activation", ["relu", "srelu", "reglu", "sreglu"])
def test_without_a_transcendental_the_bytes_are_those_of_the_composition(host_library, activation):
    x, grad = operands(activation, (13, 72), torch.bfloat16)
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, float("nan")])

    output = activation_fwd(host_library, activation, x)
    grad_input = activation_bwd(host_library, activation, grad, x)

    assert same_bytes(output, one_nan(ops.activation_fwd(x, activation=activation)))
    assert same_bytes(grad_input, one_nan(ops.activation_bwd(grad, x, activation=activation)))


@pytest.mark.parametrize("activation", ["gelu", "clamped_swiglu"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_bytes_do_not_depend_on_addresses_and_orders(host_library, activation, order):
    x, grad = operands(activation, (13, 1000), torch.bfloat16)
    expected = activation_fwd(host_library, activation, x)
    expected_grad = activation_bwd(host_library, activation, grad, x)

    host_library.configure_emulator(*ORDERS[order])
    x, grad = operands(activation, (13, 1000), torch.bfloat16, offset=1)

    assert same_bytes(activation_fwd(host_library, activation, x, offset=3), expected)
    assert same_bytes(activation_bwd(host_library, activation, grad, x, offset=1), expected_grad)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_no_elements_are_no_work(host_library, shape):
    assert activation_fwd(host_library, "gelu", torch.empty(shape)).shape == shape
    assert activation_bwd(host_library, "gelu", *[torch.empty(shape)] * 2).shape == shape
