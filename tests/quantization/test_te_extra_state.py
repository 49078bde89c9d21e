"""Extra state that Transformer Engine wrote: every form loads, damage and hostile pickles are refused."""

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
from te_hal import recipe
from te_hal.quantization import extra_state
from te_hal.quantization.te_extra_state import ARRAYS
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT = torch.load(golden_values.FOLDER / "te_checkpoint_delayed_hybrid_max.pt", weights_only=True)
PROJ = CHECKPOINT["self_attention.proj._extra_state"]


def read(saved: object) -> extra_state.SavedState | None:
    return extra_state.unpack(saved, "Linear")


def assert_holds(found: extra_state.SavedState | None, expected: dict[str, torch.Tensor]) -> None:
    assert found is not None
    assert found.arrays.keys() == expected.keys()
    assert all(torch.equal(found.arrays[name], expected[name]) for name in expected)


# What was recorded


@pytest.mark.parametrize(
    ("key", "forward", "backward"),
    [
        ("self_attention.layernorm_qkv", 3, 2),
        ("self_attention.core_attention", 9, 6),
        ("self_attention.proj", 3, 2),
        ("layernorm_mlp", 6, 4),
    ],
)
def test_the_recorded_states_give_recipe_scales_and_histories(key, forward, backward):
    state = read(CHECKPOINT[f"{key}._extra_state"])
    assert state.recipe == "DelayedScaling"
    assert (state.fields["fp8_format"], state.fields["amax_history_len"], state.fields["margin"]) == ("HYBRID", 4, 0)
    shapes = {"scale_fwd": (forward,), "amax_history_fwd": (4, forward)}
    shapes |= {"scale_bwd": (backward,), "amax_history_bwd": (4, backward)}
    assert {name: tuple(array.shape) for name, array in state.arrays.items()} == shapes
    # The scale follows from the history by rule D3; the running amax of a finished step is 0.
    for way, largest in (("fwd", 448.0), ("bwd", 57344.0)):
        amax = state.arrays[f"amax_history_{way}"].amax(dim=0)
        expected = torch.where(amax > 0, torch.tensor(largest) / amax, torch.tensor(1.0))
        assert torch.equal(state.arrays[f"scale_{way}"], expected)
        assert not state.arrays[f"amax_history_{way}"][0].any()


def test_the_recorded_weights_and_state_load_strictly_into_a_linear_layer():
    module = te.Linear(128, 128, params_dtype=torch.bfloat16)
    prefix = "self_attention.proj."
    module.load_state_dict({k.removeprefix(prefix): v for k, v in CHECKPOINT.items() if k.startswith(prefix)})
    assert torch.equal(module.weight, CHECKPOINT[f"{prefix}weight"])
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        module(torch.randn(16, 128, dtype=torch.bfloat16))
    history = module.fp8_meta["scaling_fwd"].amax_history
    assert torch.equal(history[1:3], read(PROJ).arrays["amax_history_fwd"][2:4])


def next_step(saved: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A layer with the saved values, and what its next step on the recorded input gives."""
    layer = te.TransformerLayer(
        *(128, 256, 4),
        self_attn_mask_type="causal",
        fuse_qkv_params=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
    )
    layer.load_state_dict(saved, strict=True)
    x = golden_values.load("checkpoint_next_step")["delayed_hybrid_max/x"].clone().requires_grad_()
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        y = layer(x)
    # The gradient is not recorded, but its amax is, in the history of fc2's grad_output: bf16's 0.1. It is 0.1
    # everywhere, as any other one lies far off.
    y.backward(torch.full_like(y, 0.1))
    return layer, {"y": y.detach(), "gx": x.grad}


def test_the_step_after_the_recorded_checkpoint_is_the_recorded_one():
    recorded = golden_values.load("checkpoint_next_step").case("delayed_hybrid_max")
    _, found = next_step(CHECKPOINT)
    _, anew = next_step({key: value for key, value in CHECKPOINT.items() if not key.endswith("_extra_state")})
    for key, bound in (("y", 8e-3), ("gx", 2e-2)):  # tests/golden/README.md
        # Scaling state that is lost lies within that bound as well, so it is not enough.
        distances = [float((each[key] - recorded[key]).norm() / recorded[key].norm()) for each in (found, anew)]
        assert distances[0] <= bound / 4
        assert distances[0] <= distances[1] / 4


def test_a_checkpoint_that_was_taken_over_and_saved_goes_on_as_the_one_it_came_from():
    first = te.TransformerLayer(
        *(128, 256, 4), fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16
    )
    first.load_state_dict(CHECKPOINT)
    saved = first.state_dict()
    assert not any(value.numel() and value[0] == 0x80 for key, value in saved.items() if key.endswith("_extra_state"))
    (one, expected), (other, found) = next_step(CHECKPOINT), next_step(saved)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_attention_takes_its_state_under_the_key_of_1x_too():
    attention = te.DotProductAttention(4, 32)
    state = CHECKPOINT["self_attention.core_attention._extra_state"]
    attention.load_state_dict({"fused_attention._extra_state": state}, strict=True)
    with pytest.raises(CheckpointError, match="scaling state"):
        attention.load_state_dict({"fused_attention._extra_state": PROJ}, strict=True)


# Forms


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["E4M3", "HYBRID"])
def test_a_pickled_state_with_its_recipe_is_read(name, protocol):
    with recorded_classes() as module:
        fields = {"margin": 2, "fp8_format": module.Format[name], "amax_history_len": 4, "_cached_repr": "x"}
        fields |= {"amax_compute_algo": "most_recent", "reduce_amax": False, "fp8_dpa": True, "interval": 1}
        fields |= {"override_linear_precision": module._OverrideLinearPrecision()}
        saved = (
            pickled(
                {"recipe": recipe_of(module, **fields), **arrays(), "extra_fp8_variables": {"num_gemms": 1}}, protocol
            )
            if protocol > 2
            else archived({"recipe": recipe_of(module, **fields), **arrays()})
        )
    found = read(saved)
    assert_holds(found, arrays())
    assert found.fields == {
        "margin": 2,
        "fp8_format": name,
        "amax_history_len": 4,
        "amax_compute_algo": "most_recent",
        "scaling_factor_compute_algo": None,
        "reduce_amax": False,
        "backward_override": None,
    }


def inverse(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"scale_inv_{way}": 1 / values[f"scale_{way}"] for way in ("fwd", "bwd")}


FORMS = {
    "tensor": pickled,
    "BytesIO": archived,
    "dict": dict,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("limits", "name"), [((448, 57344), "HYBRID"), ((448, 448), "E4M3"), ((), "HYBRID")])
def test_a_1x_state_without_recipe_is_read(form, limits, name):
    variables = {"num_gemms": 1, **dict(zip(("fp8_max_fwd", "fp8_max_bwd"), limits, strict=False))}
    state = {**arrays(), **inverse(arrays()), "extra_fp8_variables": variables}
    found = read(FORMS[form](state))
    assert_holds(found, arrays())
    assert (found.fields["fp8_format"], found.fields["amax_history_len"]) == (name, 4)


def test_a_state_with_the_shared_buffers_of_1x_is_read():
    shared = {"global_fp8_buffer": {"forward_1": [torch.ones(3)]}, "global_fp8_state": {"n": 1}}
    assert_holds(read(archived({**arrays(), **shared})), arrays())


def test_a_list_of_0x_gains_the_slots_that_came_later():
    old = arrays(forward=4, backward=2)
    found = read([*(old[name] for name in ARRAYS), {}, "id", 3])
    one, zero = torch.ones(1), torch.zeros(4, 1)
    f, h, g, k = (old[name] for name in ARRAYS)
    expected = {
        "scale_fwd": torch.cat([f[:2], one, f[2:], one]),
        "amax_history_fwd": torch.cat([h[:, :2], zero, h[:, 2:], zero], dim=1),
        "scale_bwd": torch.cat([g[:1], one, g[1:], one]),
        "amax_history_bwd": torch.cat([k[:, :1], zero, k[:, 1:], zero], dim=1),
    }
    assert_holds(found, expected)


def test_a_read_state_shares_nothing_with_what_it_came_from():
    source = arrays()
    found = read(dict(source))
    found.arrays["scale_fwd"].zero_()
    assert torch.equal(source["scale_fwd"], arrays()["scale_fwd"])


@pytest.mark.parametrize("value", [None, {"extra_fp8_variables": {"num_gemms": 1}}], ids=["none", "variables"])
def test_a_pickle_without_scaling_state_is_no_state(value):
    assert read(pickled(value)) is None


def test_the_pickle_of_a_recipe_that_keeps_nothing_is_no_state():
    with recorded_classes() as module:
        saved = pickled({"recipe": recipe_of(module, "Float8CurrentScaling"), "extra_fp8_variables": {}})
    assert read(saved) is None


def test_reading_leaves_the_position_of_a_stream():
    stream = archived(arrays())
    stream.seek(7)
    read(stream)
    assert stream.tell() == 7


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
