"""The bytes of _extra_state: an independent reader and writer agree, damage is refused, a module resumes exactly."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import extra_state
from te_hal.schema.errors import CheckpointError, TeHalError

ARRAYS = {
    "scale": torch.tensor([1.0, 3.4028235e38, 1e-45]),
    "history": torch.tensor([[0.0, float("inf"), -0.0], [float("nan"), 1e-40, 448.0]]),
    "none": torch.empty(0, 3),
    "single": torch.tensor(0.1),
}


def written(header: object, raw: bytes, version: int = 1) -> torch.Tensor:
    """The documented layout, put together by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<I", len(text)) + text + raw
    data = b"TE_HAL_X" + struct.pack("<II", version, zlib.crc32(body)) + body
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def small() -> torch.Tensor:
    state = extra_state.SavedState("DelayedScaling", {"margin": 0}, {"scale": torch.tensor([1.0, 2.0])})
    return extra_state.pack(state)


def test_what_is_packed_is_the_documented_layout():
    packed = extra_state.pack(extra_state.SavedState("Name", {"margin": 3, "algo": "max"}, ARRAYS))
    assert packed.dtype == torch.uint8
    assert packed.device.type == "cpu"
    data = packed.numpy().tobytes()
    assert data[:8] == b"TE_HAL_X"
    version, checksum, length = struct.unpack("<III", data[8:20])
    assert (version, checksum) == (1, zlib.crc32(data[16:]))
    header = json.loads(data[20 : 20 + length])
    assert header["recipe"] == "Name"
    assert header["fields"] == {"margin": 3, "algo": "max"}
    assert header["arrays"] == [{"name": name, "shape": list(array.shape)} for name, array in ARRAYS.items()]
    assert data[20 + length :] == b"".join(array.numpy().astype("<f4").tobytes() for array in ARRAYS.values())


def test_what_is_unpacked_is_the_documented_layout():
    header = {
        "recipe": "R",
        "fields": {"a": None},
        "arrays": [{"name": "x", "shape": [2, 1]}, {"name": "y", "shape": []}],
    }
    state = extra_state.unpack(written(header, struct.pack("<3f", 1.5, -2.0, 0.25)), "Linear")
    assert (state.recipe, state.fields) == ("R", {"a": None})
    assert torch.equal(state.arrays["x"], torch.tensor([[1.5], [-2.0]]))
    assert torch.equal(state.arrays["y"], torch.tensor(0.25))


def test_a_round_trip_is_exact_to_the_bit():
    state = extra_state.unpack(extra_state.pack(extra_state.SavedState("R", {}, ARRAYS)), "Linear")
    for name, array in ARRAYS.items():
        assert state.arrays[name].shape == array.shape
        assert torch.equal(state.arrays[name].view(torch.int32), array.view(torch.int32))


def test_fields_are_written_as_names_a_person_can_read():
    fields = {"fp8_format": recipe.Format.HYBRID, "algo": zlib.crc32, "none": None, "flag": True}
    state = extra_state.unpack(extra_state.pack(extra_state.SavedState("R", fields)), "Linear")
    assert state.fields == {"fp8_format": "HYBRID", "algo": "callable zlib.crc32", "none": None, "flag": True}


def test_no_state_is_zero_bytes_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        empty = extra_state.empty()
        read = extra_state.unpack(extra_state.pack(extra_state.SavedState("R", {}, ARRAYS)), "Linear")
    assert (empty.device.type, empty.dtype, empty.numel()) == ("cpu", torch.uint8, 0)
    assert extra_state.unpack(empty, "Linear") is None
    assert torch.equal(read.arrays["scale"], ARRAYS["scale"])


def test_every_truncation_is_refused():
    whole = small()
    for length in range(1, len(whole)):
        with pytest.raises(CheckpointError, match="Linear: _extra_state"):
            extra_state.unpack(whole[:length], "Linear")


def test_every_flipped_bit_is_refused():
    whole = small()
    for position in range(len(whole)):
        for bit in range(8):
            changed = whole.clone()
            changed[position] ^= 1 << bit
            with pytest.raises(CheckpointError, match="Linear: _extra_state"):
                extra_state.unpack(changed, "Linear")


def test_bytes_behind_the_end_are_refused():
    with pytest.raises(CheckpointError, match="checksum"):
        extra_state.unpack(torch.cat([small(), torch.zeros(1, dtype=torch.uint8)]), "Linear")


ONE = [{"name": "x", "shape": [1]}]
UNREADABLE = {
    "no JSON": (b"{", b""),
    "no text": (b"\xff\xfe", b""),
    "no mapping": ([1, 2], b""),
    "nothing in it": ({}, b""),
    "recipe is a number": ({"recipe": 1, "fields": {}, "arrays": []}, b""),
    "fields are a list": ({"recipe": "R", "fields": [], "arrays": []}, b""),
    "arrays are a number": ({"recipe": "R", "fields": {}, "arrays": 3}, b""),
    "array without shape": ({"recipe": "R", "fields": {}, "arrays": [{"name": "x"}]}, b""),
    "negative size": ({"recipe": "R", "fields": {}, "arrays": [{"name": "x", "shape": [-1, -1]}]}, b"\0\0\0\0"),
    "size of no number": ({"recipe": "R", "fields": {}, "arrays": [{"name": "x", "shape": ["n"]}]}, b""),
    "endless size": ({"recipe": "R", "fields": {}, "arrays": [{"name": "x", "shape": [2**62, 8]}]}, b""),
    "too few bytes": ({"recipe": "R", "fields": {}, "arrays": ONE}, b"\0\0\0"),
    "too many bytes": ({"recipe": "R", "fields": {}, "arrays": ONE}, b"\0" * 8),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_right_checksum_over_nonsense_is_refused(case):
    with pytest.raises(CheckpointError, match="header that cannot be read"):
        extra_state.unpack(written(*UNREADABLE[case]), "Linear")


def test_a_header_longer_than_the_file_is_refused():
    body = struct.pack("<I", 1000) + b"{}"
    data = b"TE_HAL_X" + struct.pack("<II", 1, zlib.crc32(body)) + body
    with pytest.raises(CheckpointError, match="header that cannot be read"):
        extra_state.unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), "Linear")


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_refused_by_number(version):
    header = {"recipe": "R", "fields": {}, "arrays": []}
    with pytest.raises(CheckpointError, match=f"version {version}"):
        extra_state.unpack(written(header, b"", version), "Linear")


def pickled() -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": [1.0], "recipe": None})), dtype=torch.uint8)


def test_a_pickle_that_transformer_engine_did_not_write_is_refused():
    with pytest.raises(CheckpointError, match="neither te_hal's nor Transformer Engine's"):
        extra_state.unpack(pickled(), "Linear")


OTHER_TYPES = {
    "BytesIO": io.BytesIO(b"x"),
    "bytes": b"TE_HAL_X",
    "int8 tensor": small().to(torch.int8),
    "fp32 tensor": torch.zeros(3),
    "dict": {},
}


@pytest.mark.parametrize("case", OTHER_TYPES)
def test_other_types_are_refused_with_what_they_are(case):
    with pytest.raises(CheckpointError, match="_extra_state") as raised:
        extra_state.unpack(OTHER_TYPES[case], "Linear 'first'")
    assert raised.value.where == "Linear 'first': _extra_state"
    assert isinstance(raised.value, (RuntimeError, TeHalError))


def test_a_tensor_of_another_layout_is_read_by_its_elements():
    spread = torch.stack([small(), torch.zeros_like(small())], dim=1)[:, 0]
    assert not spread.is_contiguous()
    assert extra_state.unpack(spread, "Linear").recipe == "DelayedScaling"


# In a module


def trained(steps: int = 3, **fields: object) -> te.Linear:
    torch.manual_seed(0)
    module = te.Linear(32, 32)
    chosen = recipe.DelayedScaling(**{"amax_history_len": 4, **fields})
    for step in range(steps):
        with te.autocast(recipe=chosen):
            module(torch.randn(16, 32) * 2.0**step).square().sum().backward()
    return module


def state_of(module: te.Linear) -> dict[str, torch.Tensor]:
    return {
        f"{direction}.{name}": getattr(module.fp8_meta[direction], name).clone()
        for direction in ("scaling_fwd", "scaling_bwd")
        for name in ("scale", "amax_history")
    }


def assert_same_state(first: te.Linear, second: te.Linear) -> None:
    one, other = state_of(first), state_of(second)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_module_without_fp8_saves_zero_bytes():
    module = te.Linear(32, 32)
    module(torch.randn(16, 32))
    saved = module.state_dict()["_extra_state"]
    assert (saved.dtype, saved.device.type, saved.numel()) == (torch.uint8, "cpu", 0)


def test_current_scaling_saves_zero_bytes():
    module = te.Linear(32, 32)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        module(torch.randn(16, 32)).sum().backward()
    assert module.state_dict()["_extra_state"].numel() == 0


def test_a_module_records_class_and_fields_of_its_recipe():
    saved = extra_state.unpack(trained(margin=2).state_dict()["_extra_state"], "Linear")
    assert saved.recipe == "DelayedScaling"
    assert saved.fields == {
        "margin": 2,
        "fp8_format": "HYBRID",
        "amax_history_len": 4,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    assert {name: tuple(array.shape) for name, array in saved.arrays.items()} == {
        "scale_fwd": (3,),
        "amax_history_fwd": (4, 3),
        "scale_bwd": (2,),
        "amax_history_bwd": (4, 2),
    }


@pytest.mark.parametrize("fields", [{}, {"margin": 3, "amax_compute_algo": "most_recent"}], ids=str)
def test_state_goes_through_a_file_without_pickle(fields):
    module = trained(**fields)
    module.fp8_meta["scaling_fwd"].amax_history[1] = torch.tensor([float("inf"), float("nan"), 1e-42])
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = te.Linear(32, 32)
    again.load_state_dict(torch.load(file, weights_only=True))
    for name, value in state_of(module).items():
        found = state_of(again)[name]
        assert torch.equal(found.view(torch.int32), value.view(torch.int32)), name


def test_the_next_step_after_loading_is_the_next_step_without_it():
    module = trained()
    again = te.Linear(32, 32)
    again.load_state_dict(module.state_dict())
    again.weight.grad = module.weight.grad.clone()
    x = torch.randn(16, 32)
    for each in (module, again):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            each(x).square().sum().backward()
    assert torch.equal(module.weight.grad, again.weight.grad)
    assert_same_state(module, again)


def test_the_state_of_a_derived_recipe_is_saved_and_loads():
    class Mine(recipe.DelayedScaling):
        pass

    torch.manual_seed(0)
    module = te.Linear(32, 32)
    with te.autocast(recipe=Mine(amax_history_len=4)):
        module(torch.randn(16, 32)).sum().backward()
    again = te.Linear(32, 32)
    again.load_state_dict(module.state_dict())
    assert_same_state(module, again)
    with te.autocast(recipe=Mine(amax_history_len=4)):
        again(torch.randn(16, 32))
    assert again.fp8_meta["scaling_fwd"].amax_history[-2, 0] > 0


def test_a_callable_is_saved_by_name_and_taken_from_autocast_after_loading():
    def newest(history: torch.Tensor) -> torch.Tensor:
        return history[0]

    module = trained(amax_compute_algo=newest)
    saved = module.state_dict()
    fields = extra_state.unpack(saved["_extra_state"], "Linear").fields
    assert fields["amax_compute_algo"].startswith("callable ")
    assert fields["amax_compute_algo"].endswith("newest")
    again = te.Linear(32, 32)
    again.load_state_dict(saved)
    x = torch.randn(16, 32) * 0.01
    for each in (module, again):
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=newest)):
            each(x)
    assert_same_state(module, again)
    assert again.fp8_meta["scaling_fwd"].scale[0] == torch.tensor(448.0) / x.abs().max()


BAD_STATES = {
    "cut": lambda saved: saved[:-1],
    "changed": lambda saved: torch.cat([saved[:-1], saved[-1:] ^ 1]),
    "pickle": lambda _: pickled(),
    "BytesIO": lambda _: io.BytesIO(),
    "another module": lambda _: extra_state.pack(
        extra_state.SavedState(
            "DelayedScaling", {"fp8_format": "HYBRID", "amax_history_len": 4}, {"scale_fwd": torch.ones(6)}
        )
    ),
    "another recipe": lambda _: extra_state.pack(extra_state.SavedState("NVFP4BlockScaling", {}, {})),
    "a field nobody has": lambda _: extra_state.pack(
        extra_state.SavedState("DelayedScaling", {"fp8_format": "HYBRID", "speed": 3}, {})
    ),
    "a bad field": lambda _: extra_state.pack(extra_state.SavedState("DelayedScaling", {"fp8_format": "E5M2"}, {})),
    "no format": lambda _: extra_state.pack(extra_state.SavedState("DelayedScaling", {}, {})),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_bad_state_is_refused_and_the_old_one_stays(case):
    module = trained()
    before = state_of(module)
    saved = {"_extra_state": BAD_STATES[case](module.state_dict()["_extra_state"])}
    with pytest.raises(CheckpointError, match=r"Linear: _extra_state: got .*; accepted: "):
        module.set_extra_state(saved["_extra_state"])
    after = state_of(module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        module(torch.randn(16, 32))


#: Modules, and whether they take the state of a Linear: those with as many slots do, as docs/checkpoints.md says.
TAKERS = {
    "LayerNormLinear": (lambda: te.LayerNormLinear(32, 32), True),
    "GroupedLinear of one": (lambda: te.GroupedLinear(1, 32, 32), True),
    "GroupedLinear of two": (lambda: te.GroupedLinear(2, 32, 32), False),
    "LayerNormMLP": (lambda: te.LayerNormMLP(32, 32), False),
    "RMSNorm": (lambda: te.RMSNorm(32), False),
}


@pytest.mark.parametrize("name", TAKERS)
def test_slots_are_checked_and_the_module_that_wrote_them_is_not(name):
    make, takes = TAKERS[name]
    module, state = make(), trained().state_dict()["_extra_state"]
    if takes:
        module.set_extra_state(state)
        assert torch.equal(module.get_extra_state(), state)
    else:
        with pytest.raises(CheckpointError, match=r"_extra_state: got .*; accepted: "):
            module.set_extra_state(state)


def test_no_state_starts_anew():
    for nothing in (None, extra_state.empty()):
        module = trained()
        module.set_extra_state(nothing)
        assert not module.fp8_initialized
        with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
            module(torch.full((16, 32), 2.0))
        assert module.fp8_meta["scaling_fwd"].amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]


def test_a_layer_norm_refuses_scaling_state():
    with pytest.raises(CheckpointError, match=r"LayerNorm.*scaling state"):
        te.LayerNorm(32).set_extra_state(small())
