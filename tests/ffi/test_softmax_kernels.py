"""Softmax kernels against a loop over elements in float64, in every order of threads."""

import math

import pytest
import torch
from closeness import relative_error
from emulator_orders import ORDERS
from native_cases import PLAIN_DTYPES, same_bytes
from native_ops import softmax_bwd, softmax_fwd

from te_hal.schema.softmax import SOFTMAX_BWD, SOFTMAX_FWD

NAN, INFINITY = float("nan"), float("inf")
FORWARD, BACKWARD = SOFTMAX_FWD.contract.bound, SOFTMAX_BWD.contract.bound
CAUSAL = ("NONE", "TOP_LEFT", "BOTTOM_RIGHT")
WINDOWS = ((-1, -1), (0, 0), (3, 2), (100, -1), (-1, 5), (2**62, 2**62))
#: outer, inner, queries, keys: rows of a group and of a block, rows that are too long, more queries than keys.
SHAPES = (
    (1, 1, 1, 8),
    (2, 3, 5, 13),
    (1, 2, 17, 264),
    (1, 2, 20, 9),
    (1, 2, 9, 1096),
    (1, 2, 3, 2056),
    (1, 1, 2, 4100),
)
LONG = (1, 1, 2, 16_390)


def scores(shape, dtype, offset=0):
    values = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    room = torch.empty(values.numel() + offset, dtype=dtype)
    return room[offset:].view(shape).copy_(values)


def hidden_keys(shape, causal, window, mask=None):
    """Where a key is hidden, asked for one (query, key) at a time (X2)."""
    queries, keys = shape[-2:]
    offset = keys - queries if causal == "BOTTOM_RIGHT" else 0
    left, right = window[0], 0 if causal != "NONE" else window[1]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    for query in range(queries):
        for key in range(keys):
            distance = key - (query + offset)
            hidden[query, key] = (0 <= right < distance) or (0 <= left < -distance)
    return hidden.expand(shape) if mask is None else hidden | mask.expand(shape)


def exact_softmax(x, scale, hidden):
    """float64; rows with nothing to see are zeros."""
    values = (x.float() * scale).double().masked_fill(hidden, -INFINITY)
    weights = (values - values.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total != 0, 1.0)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("shape", [*SHAPES, LONG], ids=str)
def test_the_forward_is_within_its_bound_of_float64(library, causal, shape):
    x = scores(shape, torch.bfloat16)
    exact = exact_softmax(x, 0.7, hidden_keys(shape, causal, (-1, -1)))

    output = softmax_fwd(library, x, scale=0.7, causal=causal, out_dtype=torch.float32)

    assert relative_error(output, exact) <= FORWARD[torch.float32]


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 13), (1, 2, 17, 264), (1, 2, 20, 9)], ids=str)
def test_exactly_what_causal_rule_and_window_hide_is_zero(host_library, causal, window, shape):
    x, hidden = scores(shape, torch.float32), hidden_keys(shape, causal, window)

    output = softmax_fwd(host_library, x, causal=causal, window=window)

    assert torch.equal(output == 0.0, hidden)
    assert relative_error(output, exact_softmax(x, 1.0, hidden)) <= FORWARD[torch.float32]


@pytest.mark.parametrize("mask_shape", [(2, 3, 5, 13), (2, 1, 1, 13), (1, 1, 5, 1), (1, 3, 5, 13), (13,)], ids=str)
@pytest.mark.parametrize("causal", CAUSAL)
def test_a_mask_is_read_by_its_strides(host_library, mask_shape, causal):
    x = scores((2, 3, 5, 13), torch.float16)
    mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden = hidden_keys(x.shape, causal, (-1, -1), mask)

    output = softmax_fwd(host_library, x, causal=causal, mask=mask, out_dtype=torch.float32)

    assert torch.equal(output == 0.0, hidden)
    assert relative_error(output, exact_softmax(x, 1.0, hidden)) <= FORWARD[torch.float32]


@pytest.mark.parametrize("keys", [8, 13, 1096, 2056, 16_390])
def test_nan_and_infinities_keep_to_their_rule(host_library, keys):
    x = scores((1, 1, 7, keys), torch.float32)
    x[0, 0, 0, 1] = NAN
    x[0, 0, 1, 2] = INFINITY
    x[0, 0, 2, 3] = -INFINITY
    x[0, 0, 3] = -INFINITY
    x[0, 0, 4, 5], x[0, 0, 5, 5] = NAN, INFINITY
    mask = torch.zeros(7, keys, dtype=torch.bool)
    mask[4:6, 5] = mask[6] = True
    mask[0, 4] = True

    output = softmax_fwd(host_library, x, mask=mask)[0, 0]

    assert output[0].isnan().sum() == keys - 1
    assert output[0, 4] == 0.0
    assert output[1].isnan().all()
    assert output[2, 3] == 0.0
    assert output[2].isfinite().all()
    assert (output[[3, 6]] == 0.0).all()
    assert (output[4:6, 5] == 0.0).all()
    assert output[4:6].sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_what_stands_behind_the_diagonal_does_not_matter(host_library):
    shape, exact = (1, 1, 24, 24), hidden_keys((1, 1, 24, 24), "TOP_LEFT", (-1, -1))
    clean = scores(shape, torch.bfloat16)
    dirty = clean.masked_fill(exact, NAN)

    for x in (clean, dirty):
        output = softmax_fwd(host_library, x, causal="TOP_LEFT", out_dtype=torch.float32)
        assert relative_error(output, exact_softmax(clean, 1.0, exact)) <= FORWARD[torch.float32]


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
@pytest.mark.parametrize("other", PLAIN_DTYPES, ids=str)
def test_every_pairing_of_dtypes_rounds_once(host_library, dtype, other):
    x = scores((1, 2, 17, 264), dtype)
    exact = exact_softmax(x, 0.125, torch.zeros(17, 264, dtype=torch.bool))
    grad = scores((2, 17, 264), other)

    output = softmax_fwd(host_library, x, scale=0.125, out_dtype=other)
    grad_input = softmax_bwd(host_library, grad, output.view(2, 17, 264), scale=0.125)

    assert relative_error(output, exact) <= FORWARD[other]
    assert relative_error(grad_input, exact_gradient(grad, output.view(2, 17, 264), 0.125)) <= BACKWARD[other]


def exact_gradient(grad, output, scale):
    y = output.double()
    g = grad.double().masked_fill(y == 0.0, 0.0)
    return (scale * y * (g - (g * y).sum(-1, keepdim=True))).masked_fill(y == 0.0, 0.0)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("shape", [*SHAPES, LONG], ids=str)
def test_the_backward_is_within_its_bound_and_masks_stay_masks(library, causal, shape):
    hidden = hidden_keys(shape, causal, (-1, -1))
    output = exact_softmax(scores(shape, torch.float32), 1.0, hidden).float().view(-1, *shape[2:])
    grad = scores(output.shape, torch.float32).masked_fill(output == 0.0, INFINITY)

    poisoned_output = output.masked_fill(hidden.expand(shape).reshape(output.shape), NAN)
    told = softmax_bwd(library, grad, poisoned_output, scale=0.7, causal=causal)
    untold = softmax_bwd(library, grad, output, scale=0.7)

    assert same_bytes(told, untold)
    assert ((output != 0.0) | (told == 0.0)).all()
    exact = exact_gradient(grad, output, 0.7)
    terms = (0.7 * output * grad.nan_to_num(posinf=0.0)).norm().item()
    assert (told.double() - exact).norm().item() <= BACKWARD[torch.float32] * max(exact.norm().item(), terms)


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (1, 2, 9, 1096), (1, 1, 3, 4104), LONG], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_bytes_do_not_depend_on_addresses_and_orders(host_library, shape, order):
    x, flat = scores(shape, torch.bfloat16), (math.prod(shape[:2]), *shape[2:])
    expected = softmax_fwd(host_library, x, causal="BOTTOM_RIGHT")
    expected_grad = softmax_bwd(host_library, x.view(flat), expected.view(flat))

    host_library.configure_emulator(*ORDERS[order])
    x = scores(shape, torch.bfloat16, offset=1)
    output = softmax_fwd(host_library, x, causal="BOTTOM_RIGHT", offset=1)
    grad = softmax_bwd(host_library, x.view(flat), output.view(flat), offset=3)

    assert same_bytes(output, expected)
    assert same_bytes(grad, expected_grad)


def test_many_causal_rows_are_right(host_library):
    x = scores((1, 2, 300, 512), torch.bfloat16)
    exact = exact_softmax(x, 1.0, torch.ones(300, 512, dtype=torch.bool).triu(1))

    output = softmax_fwd(host_library, x, causal="TOP_LEFT")

    assert relative_error(output, exact) <= FORWARD[torch.bfloat16]


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (1, 2, 0, 8), (1, 2, 3, 0)], ids=str)
def test_no_elements_are_no_work(host_library, shape):
    assert softmax_fwd(host_library, torch.empty(shape)).shape == shape
    assert softmax_bwd(host_library, *[torch.empty(shape[1:])] * 2).shape == shape[1:]
