"""The roll of amax histories against cpu_reference, byte for byte."""

import ctypes

import pytest
import torch
from native_cases import same_bytes

from te_hal.backends.cpu_reference.delayed_scale import update_delayed_scale

NAN, INF = float("nan"), float("inf")
#: Columns of a history of length 4, row 0 first, and what a reduction over ranks may have found.
COLUMNS = {
    "ordinary": ([3.0, 1.0, 9.0, 2.0], 4.0),
    "zero newest": ([0.0, 1.0, 9.0, 2.0], 0.0),
    "nan newest": ([NAN, 1.0, 2.0, 3.0], 0.0),
    "nan in the window": ([1.0, NAN, 2.0, 3.0], 0.0),
    "infinite newest": ([INF, 1.0, 2.0, 3.0], 0.0),
    "infinite in the window": ([1.0, 2.0, INF, 3.0], 0.0),
    "tiny": ([1e-40, 0.0, 0.0, 0.0], 0.0),
    "reduced alone": ([0.0, 1.0, 2.0, 3.0], 5.0),
    "negative zero": ([-0.0, 1.0, 2.0, 3.0], -0.0),
}


def history_of_all() -> tuple[torch.Tensor, torch.Tensor]:
    columns = [column for column, _ in COLUMNS.values()]
    return torch.tensor(columns).t().contiguous(), torch.tensor([reduced for _, reduced in COLUMNS.values()])


@pytest.mark.parametrize("algo", ["MAX", "MOST_RECENT"])
@pytest.mark.parametrize("margin", [0, 3, -2, 200, -200])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_every_kind_of_column_rolls_as_in_the_reference(library, algo, margin, is_reduced):
    history, reduced = history_of_all()
    scale = torch.full((len(COLUMNS),), 0.5)
    expected_history, expected_scale = history.clone(), scale.clone()
    update_delayed_scale(
        expected_history, expected_scale, reduced_amax=reduced if is_reduced else None, fp8_max=448.0, margin=margin,
        amax_compute_algo=algo.lower(),
    )  # fmt: skip

    given = reduced if is_reduced else None
    library.update_delayed_scale(history, scale, given, 4, len(COLUMNS), 448.0, margin, f"AMAX_{algo}", 0)

    assert same_bytes(history, expected_history)
    assert same_bytes(scale, expected_scale)


@pytest.mark.parametrize("length", [1, 2, 16, 256, 257, 1024])
def test_every_length_of_history_rolls(library, length):
    history = torch.rand(length, 5, generator=torch.Generator().manual_seed(length))
    scale, expected_history, expected_scale = torch.ones(5), history.clone(), torch.ones(5)
    update_delayed_scale(expected_history, expected_scale, fp8_max=57344.0)

    library.update_delayed_scale(history, scale, None, length, 5, 57344.0, 0, "AMAX_MAX", 0)

    assert same_bytes(history, expected_history)
    assert same_bytes(scale, expected_scale)


def test_the_reduced_amax_may_be_row_zero_itself(host_library):
    history, scale = history_of_all()[0], torch.ones(len(COLUMNS))
    expected_history, expected_scale = history.clone(), scale.clone()
    update_delayed_scale(expected_history, expected_scale, reduced_amax=expected_history[0].clone(), fp8_max=448.0)

    host_library.update_delayed_scale(history, scale, history, 4, len(COLUMNS), 448.0, 0, "AMAX_MAX", 0)

    assert same_bytes(history, expected_history)
    assert same_bytes(scale, expected_scale)


def test_many_tensors_of_different_shapes_and_formats_update_at_once(host_library):
    generator = torch.Generator().manual_seed(1)
    groups = 150  # more than one launch takes
    lengths = [1 + i % 7 for i in range(groups)]
    counts = [i % 4 for i in range(groups)]  # some without a column
    maxima = [448.0 if i % 2 else 57344.0 for i in range(groups)]
    histories = [torch.rand(length, n, generator=generator) for length, n in zip(lengths, counts, strict=True)]
    scales = [torch.ones(n) for n in counts]
    expected = [(history.clone(), scale.clone()) for history, scale in zip(histories, scales, strict=True)]
    for (history, scale), fp8_max in zip(expected, maxima, strict=True):
        if scale.numel():
            update_delayed_scale(history, scale, fp8_max=fp8_max, margin=1)

    def array(kind, values):
        return ctypes.addressof(keep.setdefault(len(keep), (kind * groups)(*values)))

    keep = {}
    host_library.update_delayed_scales(
        groups,
        array(ctypes.c_size_t, [history.data_ptr() for history in histories]),
        array(ctypes.c_size_t, [scale.data_ptr() for scale in scales]),
        None,
        array(ctypes.c_int64, lengths),
        array(ctypes.c_int64, counts),
        array(ctypes.c_double, maxima),
        *(1, "AMAX_MAX", 0),
    )

    for history, scale, (expected_history, expected_scale) in zip(histories, scales, expected, strict=True):
        assert same_bytes(history, expected_history)
        assert same_bytes(scale, expected_scale)
