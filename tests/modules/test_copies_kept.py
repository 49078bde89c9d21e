"""What a forward keeps for its backward, and which gemms run: exactly what the gradients asked for need."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from counting_backend import COLUMNWISE_IN_BACKWARD, Counting
from torch.multiprocessing.reductions import StorageWeakRef

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.formats import ColumnwiseOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from te_hal.schema.storage import QuantizedStorage

ROWS, IN, OUT = 16, 32, 48
INPUT, WEIGHT = ROWS * IN, OUT * IN

RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}
BACKENDS = {
    "rowwise": {},
    "transposed": {"reads": COLUMNWISE_IN_BACKWARD},
    "same_order": {"reads": COLUMNWISE_IN_BACKWARD, "order": ColumnwiseOrder.SAME},
}
#: Who needs a gradient: input, weight.
NEEDS = {"both": (True, True), "frozen_weight": (True, False), "plain_input": (False, True), "neither": (False, False)}


@contextmanager
def saved() -> Iterator[list[torch.Tensor]]:
    """Collects what autograd saves."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept


def codes_kept(kept: list[torch.Tensor]) -> list[int]:
    return sorted(t.numel() for t in kept if t.dtype == torch.uint8)


def layer(needs: tuple[bool, bool], **arguments: bool) -> tuple[te.Linear, torch.Tensor]:
    module = te.Linear(IN, OUT, params_dtype=torch.bfloat16, **arguments)
    module.weight.requires_grad_(needs[1])
    return module, torch.randn(ROWS, IN, dtype=torch.bfloat16, requires_grad=needs[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("who", NEEDS)
def test_one_byte_per_element_of_each_operand_that_a_gradient_reads(who, name, backend):
    Counting(**BACKENDS[backend])
    te_hal.set_backend("counting")
    module, x = layer(NEEDS[who])
    with saved() as kept, te.autocast(recipe=RECIPES[name]()):
        module(x)
    wanted = {"both": [INPUT, WEIGHT], "frozen_weight": [WEIGHT], "plain_input": [INPUT], "neither": []}[who]
    assert codes_kept(kept) == wanted
    rest = [t for t in kept if t.dtype != torch.uint8]
    assert sum(t.numel() * t.element_size() for t in rest) == 4 * len(wanted)  # a scale_inv each


def bytes_kept(kept: list[torch.Tensor]) -> int:
    """Of what autograd saved, the memory of a tensor that is saved twice counted once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in kept}.values())


#: Bytes that LayerNormLinear keeps in bf16: its input, mean and rstd of each row, the norm's result, weight and gamma.
LAYERNORM_LINEAR = {
    "plain": 2 * INPUT + 8 * ROWS + 2 * INPUT + 2 * WEIGHT + 2 * IN,
    "fp8": 2 * INPUT + 8 * ROWS + INPUT + WEIGHT + 2 * IN + 2 * 4,
}


@pytest.mark.parametrize("name", ["plain", *RECIPES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layernorm_linear_keeps_its_input_one_byte_per_normalised_element_and_the_statistics(backend, name):
    Counting(**BACKENDS[backend])
    te_hal.set_backend("counting")
    module = te.LayerNormLinear(IN, OUT, params_dtype=torch.bfloat16)
    x = torch.randn(ROWS, IN, dtype=torch.bfloat16, requires_grad=True)
    with saved() as kept, te.autocast(enabled=name != "plain", recipe=RECIPES.get(name, lambda: None)()):
        module(x)
    assert bytes_kept(kept) == LAYERNORM_LINEAR["plain" if name == "plain" else "fp8"]


FFN = 64

#: Bytes that LayerNormMLP keeps in bf16 where fc1 has G rows: input, statistics, the norm's result, fc1's weight and
#: result, the activation's result, fc2's weight, gamma; scales under FP8; without FP8 after gelu the bias of fc1.
MLP = {
    "plain": lambda g: 2 * INPUT + 8 * ROWS + 2 * (INPUT + g * IN + ROWS * g + ROWS * FFN + IN * FFN + IN),
    "fp8": lambda g: 2 * INPUT + 8 * ROWS + INPUT + g * IN + 2 * ROWS * g + ROWS * FFN + IN * FFN + 2 * IN + 4 * 4,
}


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ["plain", *RECIPES])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layernorm_mlp_keeps_what_the_documented_table_says(backend, name, activation):
    Counting(**BACKENDS[backend])
    te_hal.set_backend("counting")
    module = te.LayerNormMLP(IN, FFN, activation=activation, params_dtype=torch.bfloat16)
    x = torch.randn(ROWS, IN, dtype=torch.bfloat16, requires_grad=True)
    with saved() as kept, te.autocast(enabled=name != "plain", recipe=RECIPES.get(name, lambda: None)()):
        module(x)
    rows = FFN if activation == "gelu" else 2 * FFN
    bias = 2 * FFN if activation == "gelu" and name == "plain" else 0
    assert bytes_kept(kept) == MLP["plain" if name == "plain" else "fp8"](rows) + bias


@pytest.mark.parametrize("who", NEEDS)
def test_without_fp8_the_operands_themselves_are_kept(who):
    module, x = layer(NEEDS[who])
    with saved() as kept:
        module(x)
    wanted = {"both": [x, module.weight], "frozen_weight": [module.weight], "plain_input": [x], "neither": []}[who]
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in wanted]


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("who", NEEDS)
def test_only_the_gemms_asked_for_run(who, fp8):
    counting = Counting()
    te_hal.set_backend("counting")
    module, x = layer(NEEDS[who])
    with te.autocast(enabled=fp8):
        y = module(x)
    y.sum().backward()
    assert counting.count("gemm", "fprop") == 1
    assert counting.count("gemm", "dgrad") == NEEDS[who][0]
    assert counting.count("gemm", "wgrad") == NEEDS[who][1]
    casts = 2 + any(NEEDS[who]) if fp8 else 0  # input, weight, and the gradient of the output once for both gemms
    assert counting.count("quantize") == casts


def alive(storages: list[QuantizedStorage]) -> int:
    """Bytes of quantized data that somebody still holds. Gives the storages away, so call it last."""
    references = [
        (t.numel(), StorageWeakRef(t.untyped_storage()))
        for storage in storages
        for t in (storage.rowwise_data, storage.columnwise_data)
        if t is not None
    ]
    storages.clear()
    gc.collect()
    return sum(size for size, reference in references if not reference.expired())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", NEEDS)
def test_no_other_quantized_data_stays_alive_beside_the_graph(who, backend):
    counting = Counting(**BACKENDS[backend])
    te_hal.set_backend("counting")
    module, x = layer(NEEDS[who])
    with te.autocast():
        y = module(x)
    made = [launch.result for launch in counting.launches if launch.op == "quantize"]
    assert len(made) == 2
    counting.launches.clear()
    wanted = NEEDS[who][0] * WEIGHT + NEEDS[who][1] * INPUT
    assert alive(made) == wanted
    del y


def test_a_forward_without_gradients_keeps_nothing():
    counting = Counting()
    te_hal.set_backend("counting")
    module, x = layer((True, True))
    with torch.no_grad(), saved() as kept, te.autocast():
        y = module(x)
    made = [launch.result for launch in counting.launches if launch.op == "quantize"]
    counting.launches.clear()
    assert kept == []
    assert alive(made) == 0
    assert y.grad_fn is None


def test_a_kept_weight_is_shared_with_the_graph_and_not_kept_twice():
    counting = Counting()
    te_hal.set_backend("counting")
    module, x = layer((True, True))
    with te.autocast():
        outputs = [module(x, is_first_microbatch=index == 0) for index in range(3)]
    made = [launch.result for launch in counting.launches if launch.op == "quantize"]
    counting.launches.clear()
    assert len(made) == 4
    assert alive(made) == 3 * INPUT + WEIGHT
    del outputs


def test_bytes_do_not_depend_on_which_copies_a_gemm_reads():
    results = {}
    for backend, arguments in BACKENDS.items():
        te_hal.reset()
        Counting(**arguments)
        te_hal.set_backend("counting")
        for name, made in RECIPES.items():
            torch.manual_seed(1)
            module, x = layer((True, True))
            with te.autocast(recipe=made()):
                y = module(x)
            y.backward(torch.randn(ROWS, OUT, dtype=torch.bfloat16))
            results[backend, name] = [y, x.grad, module.weight.grad, module.bias.grad]
    for (_, name), found in results.items():
        assert all(map(torch.equal, found, results["rowwise", name]))


def test_saved_tensor_hooks_that_move_data_away_and_back_change_nothing():
    results = []
    for hooks in (False, True):
        torch.manual_seed(1)
        module, x = layer((True, True))
        with te.autocast(), torch.autograd.graph.save_on_cpu() if hooks else torch.enable_grad():
            y = module(x)
        y.sum().backward()
        results.append([x.grad, module.weight.grad])
    assert all(map(torch.equal, *results))
