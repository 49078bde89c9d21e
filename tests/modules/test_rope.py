"""Rotary position embedding: recorded values, complex multiplication in float64, gradients."""

from __future__ import annotations

import itertools

import closeness
import golden_values
import pytest
import torch

import te_hal.modules as te

RECORDED = golden_values.load("functional")
ROTATIONS = RECORDED.cases("rope/")
FORMATS = ("sbhd", "bshd")
PAIRS = {"halves": False, "neighbours": True}
FP32_ERROR = 1e-6


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The rotation of ``[s, b, h, d]`` by ``[s or s b, pairs]`` as a product of complex numbers in float64."""
    pairs = angles.shape[-1]
    part, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :].double()
    ordered = part.unflatten(-1, (pairs, 2)) if interleaved else part.unflatten(-1, (2, pairs)).transpose(-1, -2)
    factor = torch.polar(torch.ones_like(angles), angles)
    product = torch.view_as_real(torch.view_as_complex(ordered.contiguous()) * factor)
    back = product.flatten(-2) if interleaved else product.transpose(-1, -2).flatten(-2)
    return torch.cat((back, rest), -1)


def swapped(x: torch.Tensor, tensor_format: str) -> torch.Tensor:
    """``[s, b, h, d]`` in a format, or back."""
    return x if tensor_format == "sbhd" else x.transpose(0, 1)


def exact_angles(positions: torch.Tensor, dim: int) -> torch.Tensor:
    return positions.double().unsqueeze(-1) * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations_are_those_recorded_to_the_byte(case):
    values = RECORDED.case(case)
    found = te.apply_rotary_pos_emb(values["x"], values["freqs"], interleaved="interleaved=True" in case)
    assert torch.equal(found, values["y"])


@pytest.mark.parametrize("case", ROTATIONS)
def test_angles_are_those_recorded(case):
    freqs = RECORDED.case(case)["freqs"]
    for found in (
        te.RotaryPositionEmbedding(freqs.shape[-1])(16),
        te.RotaryPositionEmbedding(32, rotary_percent=freqs.shape[-1] / 32)(16),
    ):
        assert found.dtype == torch.float32
        assert closeness.relative_error(found, freqs) <= FP32_ERROR


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("rotated", [8, 16], ids="rotated={}".format)
@pytest.mark.parametrize("interleaved", PAIRS.values(), ids=list(PAIRS))
@pytest.mark.parametrize("tensor_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_rotation_is_a_complex_product_rounded_once_and_backward_turns_back(
    dtype, tensor_format, interleaved, rotated, fused
):
    x, gy = torch.randn(6, 2, 3, 16).to(dtype), torch.randn(6, 2, 3, 16).to(dtype)
    angles = exact_angles(torch.arange(6), rotated)[:, None, None]
    expected, expected_gx = turned(x, angles, interleaved), turned(gy, -angles, interleaved)
    freqs = te.RotaryPositionEmbedding(rotated, interleaved=interleaved)(9)  # longer than the sequence
    x = swapped(x, tensor_format).contiguous().requires_grad_()
    y = te.apply_rotary_pos_emb(x, freqs, tensor_format, interleaved=interleaved, fused=fused)
    y.backward(swapped(gy, tensor_format))
    for found, exact in ((y.detach(), expected), (x.grad, expected_gx)):
        assert found.dtype == dtype
        largest = exact.abs().amax()
        assert closeness.roundings(swapped(found, tensor_format), exact, FP32_ERROR * largest) <= 1
    assert torch.equal(y[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("interleaved", PAIRS.values(), ids=list(PAIRS))
@pytest.mark.parametrize("tensor_format", FORMATS)
def test_gradients_agree_with_finite_differences_for_any_angles(tensor_format, interleaved):
    x = torch.randn(3, 2, 2, 6, dtype=torch.float64, requires_grad=True)
    freqs = torch.randn(3, 1, 1, 4, dtype=torch.float64)  # another angle for each channel of a pair
    starts = torch.tensor([0, 0] if tensor_format == "sbhd" else [0, 1, 1])

    def rotate(t: torch.Tensor) -> torch.Tensor:
        return te.apply_rotary_pos_emb(t, freqs, tensor_format, starts, interleaved)

    assert torch.autograd.gradcheck(rotate, x)


@pytest.mark.parametrize("tensor_format", FORMATS)
def test_every_sequence_starts_where_it_is_told(tensor_format):
    x = torch.randn(4, 3, 2, 8)
    starts = torch.tensor([5, 0, 2])
    positions = torch.arange(4).unsqueeze(1) + starts
    expected = turned(x, exact_angles(positions, 8).unsqueeze(2), interleaved=False)
    found = te.apply_rotary_pos_emb(
        swapped(x, tensor_format), te.RotaryPositionEmbedding(8)(9), tensor_format, start_positions=starts
    )
    assert closeness.relative_error(swapped(found, tensor_format), expected) <= FP32_ERROR


PACKED = {"gapless": [0, 3, 3, 8], "tokens behind": [0, 2, 5]}


@pytest.mark.parametrize("starts", [None, [1, 0, 4]], ids=["from 0", "from starts"])
@pytest.mark.parametrize("interleaved", PAIRS.values(), ids=list(PAIRS))
@pytest.mark.parametrize("ends", PACKED.values(), ids=list(PACKED))
def test_each_packed_sequence_turns_as_it_would_alone(ends, interleaved, starts):
    x, freqs = torch.randn(8, 2, 10), te.RotaryPositionEmbedding(8, interleaved=interleaved)(9)
    x.requires_grad_()
    starts = None if starts is None else starts[: len(ends) - 1]
    given = None if starts is None else torch.tensor(starts)
    y = te.apply_rotary_pos_emb(
        x, freqs, "thd", start_positions=given, interleaved=interleaved, cu_seqlens=torch.tensor(ends).int()
    )
    gy = torch.randn_like(y)
    y.backward(gy)
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        first = 0 if starts is None else starts[number]
        angles = exact_angles(torch.arange(first, first + end - start), 8)[:, None, None]
        for found, source, sign in ((y, x, 1), (x.grad, gy, -1)):
            alone = turned(source.detach()[start:end].unsqueeze(1), sign * angles, interleaved).squeeze(1)
            assert closeness.relative_error(found.detach()[start:end], alone) <= FP32_ERROR
    assert torch.equal(y[ends[-1] :], x[ends[-1] :])
    assert torch.equal(x.grad[ends[-1] :], gy[ends[-1] :])


def test_an_offset_is_the_first_position():
    rope = te.RotaryPositionEmbedding(8, rotary_base=500.0)
    assert torch.equal(rope(4, offset=3), rope(7)[3:])


def test_neighbours_that_are_a_pair_have_one_angle():
    halves = te.RotaryPositionEmbedding(8)(5)
    neighbours = te.RotaryPositionEmbedding(8, interleaved=True)(5)
    assert torch.equal(neighbours[..., 0::2], halves[..., :4])
    assert torch.equal(neighbours[..., 1::2], halves[..., 4:])


@pytest.mark.parametrize(
    ("settings", "length", "factor"),
    [
        ({"seq_len_interpolation_factor": 4}, 8, 1 / 4),
        ({"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 8}, 16, 1 / 2),
        ({"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 8}, 32, 1 / 4),
        ({"pretrained_max_position_embeddings": 8}, 32, 1),
    ],
    ids=["factor", "within", "beyond", "no_factor"],
)
def test_positions_are_squeezed_by_the_factor_or_into_what_was_trained(settings, length, factor):
    found = te.RotaryPositionEmbedding(8, **settings)(length)
    expected = exact_angles(torch.arange(length) * factor, 8)
    assert closeness.relative_error(found[:, 0, 0, :4], expected) <= FP32_ERROR


def test_angles_stay_fp32_in_a_model_of_bf16_and_inside_autocast():
    model = torch.nn.Sequential(te.RotaryPositionEmbedding(64)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model[0](2000), te.RotaryPositionEmbedding(64)(2000))


def test_quantized_queries_are_dequantized():
    q = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(torch.randn(4, 2, 2, 8))
    freqs = te.RotaryPositionEmbedding(8)(4)
    assert torch.equal(te.apply_rotary_pos_emb(q, freqs), te.apply_rotary_pos_emb(q.dequantize(), freqs))


X, FREQS = torch.randn(4, 2, 2, 8), te.RotaryPositionEmbedding(8)(4)


def part_of(rows: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    pieces = rows.chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("tensor_format", [*FORMATS, "thd"])
def test_a_part_of_each_sequence_is_turned_as_in_the_whole(size, rank, tensor_format):
    lengths = [12, 24, 0, 12] if tensor_format == "thd" else [24]
    whole = [torch.randn(length, 2, 3, 8) for length in lengths]
    angles = te.RotaryPositionEmbedding(8)(torch.tensor(sum(lengths), dtype=torch.int32))
    expected = torch.cat([part_of(te.apply_rotary_pos_emb(x, angles), size, rank) if len(x) else x for x in whole])
    here = torch.cat([part_of(x, size, rank) if len(x) else x for x in whole])
    if tensor_format == "thd":
        ends = torch.tensor([0, *itertools.accumulate(lengths)])
        found = te.apply_rotary_pos_emb(
            here[:, 0], angles, "thd", cu_seqlens=ends, cp_size=size, cp_rank=rank, fused=True
        ).unsqueeze(1)
        expected = expected[:, :1]
    else:
        leaf = swapped(here, tensor_format).requires_grad_()
        turned_ = te.apply_rotary_pos_emb(leaf, angles, tensor_format, cp_size=size, cp_rank=rank)
        (back,) = torch.autograd.grad(turned_, leaf, turned_.detach())
        assert torch.allclose(back, leaf, atol=FP32_ERROR * 4)
        found = swapped(turned_, tensor_format)
    assert torch.equal(found, expected)


BAD = {
    "short": ({"freqs": FREQS[:3]}, ValueError, r"freqs: got shape \(3, 1, 1, 8\)"),
    "wide": ({"freqs": te.RotaryPositionEmbedding(16)(4)}, ValueError, "an even number up to 8"),
    "odd": ({"freqs": FREQS[..., :3]}, ValueError, "an even number up to 8"),
    "flat": ({"freqs": FREQS[:, 0, 0]}, ValueError, "freqs: got shape"),
    "rank": ({"t": X[0]}, ValueError, r"t: got shape \(2, 2, 8\); accepted: \[s, b, h, d\]"),
    "dtype": ({"t": X.int()}, ValueError, r"t: got torch\.int32"),
    "list": ({"t": [1]}, TypeError, "t: got a list"),
    "format": ({"tensor_format": "sbdh"}, ValueError, "tensor_format: got 'sbdh'; accepted: sbhd, bshd, thd"),
    "thd": ({"tensor_format": "thd"}, ValueError, r"t: got shape \(4, 2, 2, 8\); accepted: \[t, h, d\]"),
    "no ends": ({"t": X[0], "tensor_format": "thd"}, ValueError, "cu_seqlens: got None with tensor_format='thd'"),
    "ends": ({"cu_seqlens": torch.tensor([0, 2])}, ValueError, "cu_seqlens: got a value with tensor_format='sbhd'"),
    "falling": (
        {"t": X[0], "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 2, 1])},
        ValueError,
        r"cu_seqlens: got \[0, 2, 1\]; accepted: .* never falling",
    ),
    "beyond": (
        {"t": X[0], "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 3])},
        ValueError,
        "cu_seqlens: got 3 tokens by its last number; accepted: at most 2",
    ),
    "longer than angles": (
        {"t": X.flatten(0, 1), "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 8])},
        ValueError,
        r"freqs: got shape \(4, 1, 1, 8\).*at least 8",
    ),
    "no part": ({"cp_size": 0}, ValueError, "cp_size: got 0"),
    "rank of parts": ({"cp_size": 2, "cp_rank": 2}, ValueError, "cp_rank: got 2; accepted: an int from 0 to 1"),
    "rank alone": ({"cp_rank": 1}, ValueError, "cp_rank: got 1; accepted: an int from 0 to 0"),
    "starts of parts": (
        {"cp_size": 2, "start_positions": torch.tensor([0, 0])},
        ValueError,
        "start_positions: got a value with cp_size=2",
    ),
    "too few angles of parts": ({"cp_size": 4}, ValueError, "freqs: got .*at least 16"),
    "odd parts": ({"t": X[:1], "cp_size": 2}, ValueError, "sequences that do not make 2 equal pieces"),
    "odd packed parts": (
        {"t": X[0], "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 2]), "cp_size": 2},
        ValueError,
        "sequences that do not make 4 equal pieces",
    ),
    "starts_below": ({"start_positions": torch.tensor([0, -1])}, ValueError, r"positions from -1 to 0; .* from 0 to "),
    "starts_beyond": ({"start_positions": torch.tensor([99, 0])}, ValueError, r"positions from 0 to 99"),
    "starts": ({"start_positions": torch.zeros(3)}, ValueError, r"start_positions: got torch\.float32 \(3,\)"),
    "flag": ({"interleaved": 1}, ValueError, "interleaved: got 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_by_name(name):
    arguments, error, message = BAD[name]
    with pytest.raises(error, match=message):
        te.apply_rotary_pos_emb(**{"t": X, "freqs": FREQS, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim: got 0"),
        ({"dim": 7}, "7 channels to rotate"),
        ({"dim": 8, "rotary_percent": 0.1}, "0 channels to rotate"),
        ({"dim": 8, "rotary_percent": None}, "rotary_percent: got None"),
        ({"dim": 8, "rotary_percent": 1.5}, "rotary_percent: got 1.5; accepted: a positive number up to 1"),
        ({"dim": 8, "rotary_base": -1.0}, "rotary_base: got -1.0"),
        ({"dim": 8, "seq_len_interpolation_factor": 0}, "factor: got 0"),
    ],
    ids=str,
)
def test_an_embedding_without_pairs_or_positive_numbers_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        te.RotaryPositionEmbedding(**arguments)


@pytest.mark.parametrize(("length", "offset"), [(0, 0), (2.0, 0), (4, 1.5), (4, True)], ids=str)
def test_positions_are_ints(length, offset):
    with pytest.raises(ValueError, match=r"RotaryPositionEmbedding: (max_seq_len|offset): got"):
        te.RotaryPositionEmbedding(8)(length, offset)
