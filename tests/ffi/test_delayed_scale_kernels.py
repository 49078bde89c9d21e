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
@pytest.mark.parametrize("margin", [0, 3, -2, 100, -100])
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


#: Where each group's history, scale and reduced amax begin in one piece of memory, in elements; [2, 4], [4], [4].
SHARED = {
    "the_same_twice": ([(0, 8, None), (0, 8, None)], "amax_history of group 0 and amax_history of group 1"),
    "one_scale": ([(0, 8, None), (16, 8, None)], "scale of group 0 and scale of group 1"),
    "a_scale_in_a_history": ([(0, 32, None), (16, 20, None)], "amax_history and scale share"),
    "a_scale_in_another_history": ([(0, 20, None), (16, 32, None)], "amax_history of group 1 and scale of group 0"),
    "another_ones_history_is_read": ([(0, 8, 16), (16, 24, None)], "share memory"),
    "the_last_element": ([(0, 8, None), (11, 19, None)], "scale of group 0 and amax_history of group 1"),
    "far_apart_in_the_list": (
        [(16 * i, 16 * i + 8, None) for i in range(99)] + [(48, 2000, None)],
        "amax_history of group 3 and amax_history of group 99",
    ),
}
APART = {
    "side_by_side": [(0, 8, None), (12, 20, None)],
    "one_reduced_amax_for_both": [(0, 8, 40), (12, 20, 40)],
    "row_zero_of_its_own": [(0, 8, 0), (12, 20, 12)],
}


def update_groups(library, groups):
    """The status of an update of groups that begin where ``groups`` says, and the memory."""
    memory = torch.full((2100,), 2.0)
    address = [[None if start is None else memory.data_ptr() + 4 * start for start in group] for group in groups]
    arrays = [(ctypes.c_size_t * len(groups))(*(starts or 0 for starts in kind)) for kind in zip(*address, strict=True)]
    shapes = [(ctypes.c_int64 * len(groups))(*[size] * len(groups)) for size in (2, 4)]
    maxima = (ctypes.c_double * len(groups))(*[448.0] * len(groups))
    given = [ctypes.addressof(array) for array in (*arrays, *shapes, maxima)]
    return library.call("update_delayed_scales", len(groups), *given, 0, "AMAX_MAX", 0), memory


@pytest.mark.parametrize("case", SHARED)
def test_what_a_group_writes_is_no_other_groups(host_library, case):
    groups, names = SHARED[case]
    status, memory = update_groups(host_library, groups)

    assert status == host_library.codes["OVERLAP"]
    assert host_library.last_error().startswith("update_delayed_scales: ")
    assert names in host_library.last_error()
    assert torch.equal(memory, torch.full((2100,), 2.0))


@pytest.mark.parametrize("case", APART)
def test_groups_apart_may_read_the_same(host_library, case):
    status, memory = update_groups(host_library, APART[case])

    assert status == 0, host_library.last_error()
    assert memory[8:12].tolist() == [224.0] * 4
    assert memory[20:24].tolist() == [224.0] * 4
