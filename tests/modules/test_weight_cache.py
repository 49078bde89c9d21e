"""is_first_microbatch: quantized weights are kept where that changes nothing, and never used past their time."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from counting_backend import COLUMNWISE_IN_BACKWARD, Counting
from hybrids import data, hybrid
from torch.multiprocessing.reductions import StorageWeakRef

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.formats import ColumnwiseOrder

RECIPES = {"delayed": lambda: recipe.DelayedScaling(amax_history_len=4), "current": recipe.Float8CurrentScaling}
BACKENDS = {
    "rowwise": {},
    "transposed": {"reads": COLUMNWISE_IN_BACKWARD},
    "same_order": {"reads": COLUMNWISE_IN_BACKWARD, "order": ColumnwiseOrder.SAME},
}
GRAD = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}

#: Each microbatch: the flag, and under what it runs.
SEQUENCES = {
    "plain": [(True, "grad"), (False, "grad"), (False, "grad")],
    "never_first": [(False, "grad"), (False, "grad")],
    "filled_without_gradients": [(True, "no_grad"), (False, "grad"), (False, "no_grad"), (False, "grad")],
    "filled_in_inference_mode": [(True, "inference"), (False, "grad"), (False, "inference"), (False, "no_grad")],
    "mixed_with_none": [(True, "grad"), (None, "grad"), (False, "grad"), (None, "no_grad"), (False, "grad")],
    "first_again": [(True, "grad"), (True, "no_grad"), (False, "grad")],
}


def microbatch(module: te.Linear, flag, under: str, chosen, index: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(16, 32, generator=generator, requires_grad=True)
    with GRAD[under](), te.autocast(recipe=chosen):
        y = module(x, is_first_microbatch=flag)
    if under != "grad":
        return [y]
    y.backward(torch.randn(16, 48, generator=generator))
    return [y, x.grad, module.weight.grad.clone()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_results_equal_those_without_the_argument(sequence, name, backend):
    Counting(**BACKENDS[backend])
    te_hal.set_backend("counting")
    cached, plain = te.Linear(32, 48), te.Linear(32, 48)
    plain.load_state_dict(cached.state_dict())
    first, second = RECIPES[name](), RECIPES[name]()
    if name == "delayed":
        # A scale of 1 for good: else the weight that is kept has the scale of the microbatch that made it.
        for chosen in (first, second):
            chosen.scaling_factor_compute_algo = lambda amax, scale, fp8_max, chosen: scale  # noqa: ARG005
    for index, (flag, under) in enumerate(SEQUENCES[sequence]):
        found = microbatch(cached, flag, under, first, index)
        expected = microbatch(plain, None, under, second, index)
        assert all(map(torch.equal, found, expected)), index


def test_false_quantizes_no_weight_and_records_no_amax_of_it():
    counting = Counting()
    te_hal.set_backend("counting")
    module, chosen = te.Linear(32, 48), RECIPES["delayed"]()
    microbatch(module, True, "grad", chosen, 0)
    history = module.fp8_meta["scaling_fwd"].amax_history[:, 1].clone()
    counting.launches.clear()
    microbatch(module, False, "grad", chosen, 1)
    assert counting.count("quantize") == 2  # input and gradient
    assert torch.equal(module.fp8_meta["scaling_fwd"].amax_history[:, 1], history)


def test_none_neither_fills_nor_reads_the_cache():
    counting = Counting()
    te_hal.set_backend("counting")
    module, chosen = te.Linear(32, 48), RECIPES["current"]()
    microbatch(module, None, "grad", chosen, 0)
    assert module._fp8_workspaces == {}
    microbatch(module, True, "grad", chosen, 0)
    counting.launches.clear()
    microbatch(module, None, "grad", chosen, 0)
    assert counting.count("quantize") == 3


def test_without_fp8_nothing_is_kept():
    module = te.Linear(32, 48)
    module(torch.randn(16, 32), is_first_microbatch=True)
    assert module._fp8_workspaces == {}


def loads(module: te.Linear) -> None:
    module.load_state_dict({"weight": torch.ones(48, 32), "bias": torch.zeros(48)})


def loads_loosely(module: te.Linear) -> None:
    module.load_state_dict({"weight": torch.ones(48, 32)}, strict=False)


def loads_by_assignment(module: te.Linear) -> None:
    module.load_state_dict({"weight": torch.ones(48, 32), "bias": torch.zeros(48)}, assign=True)


def steps(module: te.Linear) -> None:
    torch.optim.SGD(module.parameters(), lr=1.0).step()


def replaces(module: te.Linear) -> None:
    module.weight = torch.nn.Parameter(torch.ones(48, 32))


def writes(module: te.Linear) -> None:
    with torch.no_grad():
        module.weight.fill_(1.0)


def assigns_data(module: te.Linear) -> None:
    module.weight.data = torch.full_like(module.weight, 0.5)


def writes_data_and_clears(module: te.Linear) -> None:
    module.weight.data.fill_(1.0)
    module.clear_weight_caches()


CHANGES = [loads, loads_loosely, loads_by_assignment, steps, replaces, writes, assigns_data, writes_data_and_clears]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_that_changed_since_is_not_ignored(name, change):
    module, chosen = te.Linear(32, 48), RECIPES[name]()
    microbatch(module, True, "grad", chosen, 0)
    change(module)
    fresh = te.Linear(32, 48)
    fresh.load_state_dict(module.state_dict())
    found = microbatch(module, False, "no_grad", chosen, 1)
    assert torch.equal(found[0], microbatch(fresh, None, "no_grad", RECIPES[name](), 1)[0])


def test_a_changed_part_of_a_split_weight_is_noticed():
    module, chosen = te.Linear(32, 48, parameters_split=("q", "k", "v"), bias=False), RECIPES["current"]()
    x = torch.randn(16, 32)
    with te.autocast(recipe=chosen):
        module(x, is_first_microbatch=True)
        with torch.no_grad():
            module.v_weight.fill_(1.0)
        assert torch.equal(module(x, is_first_microbatch=False), module(x))


@pytest.mark.parametrize(
    "other",
    [
        recipe.Float8CurrentScaling(use_power_2_scales=True),
        recipe.DelayedScaling(),
        recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3),
    ],
    ids=["power_of_2", "delayed", "e4m3"],
)
def test_another_recipe_takes_nothing_from_the_cache(other):
    module, x = te.Linear(32, 48), torch.randn(16, 32)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        module(x, is_first_microbatch=True)
    with torch.no_grad(), te.autocast(recipe=other):
        with pytest.warns(UserWarning, match="quantized anew"):
            found = module(x, is_first_microbatch=False)
        assert torch.equal(found, module(x))


def test_a_recipe_changed_in_place_takes_nothing_from_the_cache():
    module, x, chosen = te.Linear(32, 48), torch.randn(16, 32), recipe.Float8CurrentScaling()
    with te.autocast(recipe=chosen):
        module(x, is_first_microbatch=True)
        chosen.use_power_2_scales = True
        with pytest.warns(UserWarning, match="use_power_2_scales=False.*under .*use_power_2_scales=True"):
            found = module(x, is_first_microbatch=False)
        assert torch.equal(found, module(x))


def test_another_backend_takes_nothing_from_the_cache():
    module, x, chosen = te.Linear(32, 48), torch.randn(16, 32), recipe.Float8CurrentScaling()
    with te_hal.use_backend("null"), te.autocast(recipe=chosen):
        module(x, is_first_microbatch=True)
    with te.autocast(recipe=chosen):
        assert torch.equal(module(x, is_first_microbatch=False), module(x))


def test_another_activation_dtype_takes_nothing_from_the_cache():
    module, x, chosen = te.Linear(32, 48), torch.randn(16, 32), recipe.Float8CurrentScaling()
    with te.autocast(recipe=chosen):
        module(x, is_first_microbatch=True)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = module(x, is_first_microbatch=False), module(x)
    assert torch.equal(found, expected)


def filled() -> tuple[te.Linear, list[StorageWeakRef]]:
    """A layer that keeps a weight, and references to that weight's memory that do not hold it."""
    module = te.Linear(32, 48)
    with torch.no_grad(), te.autocast():
        module(torch.randn(16, 32), is_first_microbatch=True)
    kept = module._fp8_workspaces["weight"]
    return module, [StorageWeakRef(t.untyped_storage()) for t in kept.tensors() if t is not None]


MOVES = {
    "to_meta": lambda module: module.to("meta"),
    "cpu": lambda module: module.cpu(),
    "half": lambda module: module.half(),
    "clear": lambda module: module.clear_weight_caches(),
    "load": loads,
    "in_a_model": lambda module: torch.nn.Sequential(module).to("meta"),
}


@pytest.mark.parametrize("name", MOVES)
def test_the_memory_of_a_kept_weight_is_free_once_the_module_moves(name):
    module, references = filled()
    assert not any(reference.expired() for reference in references)
    MOVES[name](module)
    gc.collect()
    assert all(reference.expired() for reference in references)
    assert module._fp8_workspaces == {}


def test_the_memory_of_a_kept_weight_is_free_once_the_module_is_gone():
    module, references = filled()
    del module
    gc.collect()
    assert all(reference.expired() for reference in references)


def saved_and_loaded(module: te.Linear) -> te.Linear:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch_save": saved_and_loaded,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copied_module_quantizes_its_own_weight_and_records_its_own_amax(name):
    module, chosen = te.Linear(32, 48), RECIPES["delayed"]()
    microbatch(module, True, "grad", chosen, 0)
    made = COPIES[name](module)
    assert made._fp8_workspaces == {}
    with torch.no_grad():
        made.weight.mul_(100.0)
    before = module.fp8_meta["scaling_fwd"].amax_history.clone()
    microbatch(made, False, "grad", chosen, 1)
    assert torch.equal(module.fp8_meta["scaling_fwd"].amax_history, before)
    assert made.fp8_meta["scaling_fwd"].amax_history[-1, 1] == made.weight.abs().max()
    found, expected = (microbatch(m, None, "no_grad", chosen, 2)[0] for m in (module, COPIES[name](module)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("flag", [0, 1, "first", 1.0, torch.tensor(data=True)], ids=repr)
def test_a_flag_that_is_no_bool_is_refused(flag):
    with pytest.raises(ValueError, match="is_first_microbatch"):
        te.Linear(32, 48)(torch.randn(16, 32), is_first_microbatch=flag)


PAIRS = [("mxfp8", "nvfp4"), ("identity", "mxfp8"), ("1x128", "current")]


def microbatches_of_a_hybrid(pair: tuple[str, str], flags: list[bool | None], *, checkpoints: bool = False):
    """Results and gradients of each microbatch, how often a weight was quantized by then, and the module."""
    torch.manual_seed(3)
    module, made = te.Linear(64, 96, params_dtype=torch.bfloat16), []

    def factory(role):
        return hybrid(pair) if role is not None and role.tensor_type == "weight" else te.IdentityQuantizer()

    chosen, found = recipe.CustomRecipe(qfactory=factory), []
    for index, flag in enumerate(flags):
        x, gy = data(32, 64, seed=index).requires_grad_(), data(32, 96, seed=9)
        with te.autocast(recipe=chosen):
            y = te.checkpoint(module, x, is_first_microbatch=flag) if checkpoints else module(x, flag)
        module.observe_quantizers(None)
        module.observe_quantizers(lambda key, slot: lambda *_: made.append((key, slot)))
        y.backward(gy)
        found += [y.detach(), x.grad]
    return module, found, made


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_results_with_a_kept_weight_of_two_parts_equal_those_without(pair, checkpoints):
    _, found, made = microbatches_of_a_hybrid(pair, [True, False, False], checkpoints=checkpoints)
    _, expected, _ = microbatches_of_a_hybrid(pair, [None] * 3, checkpoints=checkpoints)
    assert all(map(torch.equal, found, expected))
    assert ("scaling_fwd", 1) not in made


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_kept_weight_of_two_parts_is_counted(pair):
    module, _, _ = microbatches_of_a_hybrid(pair, [True])
    kept = module._fp8_workspaces["weight"]
    entries = [entry for entry in te.memory_report(module).entries if entry.kind == "cached weight"]
    buffers = {t.data_ptr(): t.nbytes for t in kept.tensors() if t is not None and t is not module.weight}
    buffers.pop(module.weight.data_ptr(), None)  # a part in high precision is the parameter itself
    assert sum(entry.nbytes for entry in entries) == sum(buffers.values()) > 0
    assert {entry.name.split(" part")[0] for entry in entries} == {
        "weight (kept) (rowwise",
        "weight (kept) (columnwise",
    }


def test_a_changed_weight_of_two_parts_is_quantized_again():
    module, _, made = microbatches_of_a_hybrid(("mxfp8", "nvfp4"), [True, False])
    with torch.no_grad():
        module.weight.mul_(2)
    with te.autocast(recipe=module.fp8_meta["recipe"]):
        found = module(data(), is_first_microbatch=False)
        assert made == [("scaling_fwd", 1)]
        assert torch.equal(found, module(data()))
