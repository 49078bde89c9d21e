"""Extra state that Transformer Engine would not write: damage and hostile pickles are refused, and none is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from typing import TYPE_CHECKING

import golden_values
import pytest
import torch
from pickle_programs import archived, arrays, as_tensor, pickled, recipe_of, recorded_classes

import te_hal.modules as te
from te_hal.quantization import extra_state
from te_hal.quantization.te_extra_state import ARRAYS
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT = torch.load(golden_values.FOLDER / "te_checkpoint_delayed_hybrid_max.pt", weights_only=True)
PROJ = CHECKPOINT["self_attention.proj._extra_state"]


def read(saved: object) -> extra_state.SavedState | None:
    return extra_state.unpack(saved, "Linear")


# Damage


def foreign_recipe(**fields: object) -> torch.Tensor:
    with recorded_classes() as module:
        return pickled({"recipe": recipe_of(module, **fields), **arrays()})


def changed(**entries: object) -> torch.Tensor:
    return pickled({**arrays(), **entries})


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, raw in entries.items():
            archive.writestr(name, raw)
    return buffer


def pickled_recipe_alone() -> torch.Tensor:
    with recorded_classes() as module:
        return pickled({"recipe": recipe_of(module, margin=0)})


def foreign_class() -> torch.Tensor:
    with recorded_classes() as module:
        return pickled({"recipe": recipe_of(module, "Foreign"), **arrays()})


BAD = {
    "empty BytesIO": io.BytesIO,
    "no dict": lambda: pickled([1, 2]),
    "empty dict": dict,
    "short list": lambda: [torch.ones(3)],
    "another entry": lambda: changed(weights=1),
    "half of it": lambda: pickled({"scale_fwd": torch.ones(3)}),
    "delayed scaling without arrays": pickled_recipe_alone,
    "half precision": lambda: changed(scale_fwd=torch.ones(3).half()),
    "a number as scale": lambda: changed(scale_fwd=1.0),
    "a scale of zero": lambda: changed(scale_fwd=torch.tensor([1.0, 0.0, 1.0])),
    "a scale of NaN": lambda: changed(scale_fwd=torch.tensor([1.0, float("nan"), 1.0])),
    "a negative amax": lambda: changed(amax_history_fwd=-torch.ones(4, 3)),
    "a history of one dimension": lambda: changed(amax_history_fwd=torch.ones(3)),
    "histories of different lengths": lambda: changed(amax_history_bwd=torch.ones(5, 2)),
    "a history without rows": lambda: pickled(arrays(rows=0)),
    "other slots": lambda: pickled(arrays(forward=3, backward=3)),
    "scales for other slots": lambda: changed(scale_fwd=torch.ones(6)),
    "a strided tensor": lambda: changed(amax_history_fwd=torch.ones(3, 4).t()),
    "a field nobody has": lambda: foreign_recipe(speed=3),
    "no known format": lambda: foreign_recipe(fp8_format=(240, 240)),
    "single gemms unquantized": lambda: foreign_recipe(override_linear_precision=(True, False, False)),
    "another class": foreign_class,
    "compressed": lambda: zipped({"a/data.pkl": pickle.dumps(None, 2)}, zipfile.ZIP_DEFLATED),
    "no pickle in the archive": lambda: zipped({"a/b": b""}),
    "big-endian": lambda: zipped({"a/data.pkl": pickle.dumps(None, 2), "a/byteorder": b"big"}),
    "bytes behind the end": lambda: as_tensor(PROJ.numpy().tobytes() + b"\0"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_transformer_engine_would_not_write_is_refused(name):
    with pytest.raises(CheckpointError, match=r"Linear: _extra_state: got state that is neither"):
        read(BAD[name]())


def test_every_truncation_of_a_recorded_state_is_refused():
    for length in range(1, len(PROJ), 7):
        with pytest.raises(CheckpointError, match="_extra_state"):
            read(PROJ[:length])


def test_every_truncation_of_an_archive_is_refused():
    whole = archived(arrays()).getvalue()
    for length in range(0, len(whole), 97):
        with pytest.raises(CheckpointError, match="_extra_state"):
            read(io.BytesIO(whole[:length]))


def test_a_flipped_bit_is_refused_or_changes_values_only():
    for position in range(0, len(PROJ), 3):
        altered = PROJ.clone()
        altered[position] ^= 1 << (position % 8)
        try:
            found = read(altered)
        except CheckpointError:
            continue
        if found is not None:
            assert {tuple(array.shape) for array in found.arrays.values()} == {(3,), (4, 3), (2,), (4, 2)}


@pytest.mark.parametrize("form", ["pickle", "archive"])
def test_random_damage_is_refused_by_the_right_error_or_changes_values_only(form):
    whole = PROJ.numpy().tobytes() if form == "pickle" else archived(arrays()).getvalue()
    draw = random.Random(0)  # noqa: S311 - the same damage every time
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 2, 8])):
            place = draw.randrange(len(data))
            if draw.random() < 0.7:
                data[place] = draw.randrange(256)
            else:
                del data[place : place + draw.randrange(1, 40)]
        try:
            found = read(io.BytesIO(bytes(data)))
        except CheckpointError:
            continue
        assert found is None or found.arrays.keys() == set(ARRAYS)


def test_an_archive_that_points_out_of_the_world_is_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(None, 2))
        archive.filelist[0].header_offset = 2**63
    with pytest.raises(CheckpointError, match="a damaged archive"):
        read(buffer)


SIZES = {
    "more than its memory": ((10**6,), (1,)),
    "past every machine": ((2**62, 8), (8, 1)),
    "negative": ((-3,), (1,)),
    "a step of zero": ((4, 3), (0, 0)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_memory_does_not_have_are_refused(name):
    shape, stride = SIZES[name]

    class Claims:
        def __reduce__(self) -> object:
            storage = torch.ones(12).untyped_storage()
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (typed, 0, shape, stride, False, {})

    for saved in (changed(amax_history_fwd=Claims()), archived({**arrays(), "amax_history_fwd": Claims()})):
        with pytest.raises(CheckpointError, match="_extra_state"):
            read(saved)


# Hostility


class _Runs:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.target}",)


def hidden(run: object) -> dict[str, object]:
    """Where a program could stand in a state."""
    with recorded_classes() as module:
        return {
            "the whole": pickled(run),
            "an array": changed(scale_fwd=run),
            "a variable": changed(extra_fp8_variables={"num_gemms": [(run,)]}),
            "the recipe": changed(recipe=run),
            "a field": pickled({"recipe": recipe_of(module, amax_compute_algo=run), **arrays()}),
            "an archive": archived({**arrays(), "extra_fp8_variables": run}),
            "a key": as_tensor(pickle.dumps(run, 2)[:-1] + b"\x80\x02."),
        }


def test_a_state_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    target = tmp_path / "touched"
    module = te.Linear(32, 32)
    weight = module.weight.clone()
    for place, saved in hidden(_Runs(target)).items():
        with pytest.raises(CheckpointError, match="_extra_state"):
            module.load_state_dict({"weight": torch.ones(32, 32), "bias": torch.ones(32), "_extra_state": saved})
        assert not target.exists(), place
        assert torch.equal(module.weight, weight), place


def test_a_program_inside_the_bytes_of_a_tensor_is_refused(tmp_path):
    target = tmp_path / "touched"

    class Inner:
        def __reduce__(self) -> object:
            return torch.storage._load_from_bytes, (pickle.dumps(_Runs(target)),)

    class Tensor:
        def __reduce__(self) -> object:
            return torch._utils._rebuild_tensor_v2, (Inner(), 0, (3,), (1,), False, {})

    with pytest.raises(CheckpointError, match=r"reference to \w+\.system"):
        read(changed(scale_fwd=Tensor()))
    assert not target.exists()


def test_a_refused_state_of_one_layer_leaves_every_layer_as_it_was():
    model = torch.nn.ModuleList([te.Linear(32, 32), te.Linear(32, 32)])
    saved = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    saved |= {"0._extra_state": extra_state.empty(), "1._extra_state": pickled({"weights": 1})}
    before = model[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"key '1\._extra_state'"):
        te.check_extra_states(model, saved)
    assert torch.equal(model[0].weight, before)


def test_state_in_which_nothing_was_recorded_is_dropped_by_a_module_without_state():
    attention = CHECKPOINT["self_attention.core_attention._extra_state"]
    norm = te.LayerNorm(128)
    norm.load_state_dict({"weight": torch.ones(128), "bias": torch.zeros(128), "_extra_state": attention})
    assert norm.get_extra_state().numel() == 0
    with pytest.raises(CheckpointError, match="scaling state"):
        norm.set_extra_state(PROJ)
