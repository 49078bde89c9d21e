"""te_hal.shadow: planted faults are found and named; right training is left alone, to the bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from planted_fault import nan_dropped, one_element, one_percent, plant
from stub_backends import refuse, stub

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.dispatch import register_backend
from te_hal.schema.errors import ArgumentError, BackendNotFoundError, StateError
from te_hal.shadowing import ShadowError, ShadowWarning
from te_hal.testing import Case

STEPS = 3
RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 64), te.LayerNormLinear(64, 64), te.LayerNormMLP(64, 128)).bfloat16()


def train(chosen: recipe.Recipe | None, shadow: te_hal.shadowing.Shadow | None = None) -> list[float]:
    """Losses of a regression."""
    net, losses = model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(STEPS):
        x, target = (torch.randn(32, n, generator=torch.Generator().manual_seed(step)).bfloat16() for n in (32, 64))
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = net(x)
        loss = (y.float() - target.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if shadow is not None:
            shadow.step()
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_training_beside_the_reference_has_the_same_losses_and_no_difference(name, tmp_path) -> None:
    with te_hal.shadow(folder=tmp_path / "calls") as shadow:
        losses = train(RECIPES[name], shadow)
    assert losses == train(RECIPES[name])
    assert shadow.difference is None
    counts = shadow.cost.ops.values()
    assert shadow.cost.compared == sum(count.seen for count in counts) > 50
    assert shadow.cost.left_out == {}
    assert not (tmp_path / "calls").exists()


FAULTS = {
    "gemm wrong in one element": ("gemm", one_element, {"layout": "fprop"}, "0 of Sequential", "forward"),
    "dgrad off by a percent": ("gemm", one_percent, {"layout": "dgrad"}, "2 of Sequential", "backward"),
    "a code off by one": ("quantize", one_element, {"dtype": torch.float8_e4m3fn}, "0 of Sequential", "forward"),
    "a norm off by a percent": ("layernorm_fwd", one_percent, {}, "1 of Sequential", "forward"),
    "a norm's backward": ("layernorm_bwd", one_percent, {}, "2 of Sequential", "backward"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported_with_op_layer_direction_and_file(fault, tmp_path) -> None:
    op, harm, when, layer, direction = FAULTS[fault]
    backend = plant(op, harm, when=lambda **given: when.items() <= given.items())
    with te_hal.shadow(backend, folder=tmp_path) as shadow, pytest.warns(ShadowWarning, match=op):
        train(RECIPES["delayed"], shadow)
    found = shadow.difference
    assert (found.op, found.backend, found.step, found.layer) == (op, "faulty", 1, layer)
    assert found.direction.startswith(direction)
    assert found.call.startswith(f"{op}(")
    assert Case.of(found.case).op == op
    assert found.findings
    assert [found.file] == list(tmp_path.iterdir())
    assert shadow.cost.ops[op].differing > 1
    assert f"first difference: {op}" in shadow.report()


def test_the_step_of_a_fault_that_comes_late_is_named(tmp_path) -> None:
    per_step = 4  # products of Linear, LayerNormLinear and the two of LayerNormMLP
    backend = plant("gemm", one_percent, after=2 * per_step, when=lambda *, layout, **_: layout == "fprop")
    with te_hal.shadow(backend, folder=tmp_path) as shadow, pytest.warns(ShadowWarning, match="step 3"):
        train(None, shadow)
    assert shadow.difference.step == 3


def test_a_fault_in_a_part_is_named_before_the_op_that_is_made_of_it(tmp_path) -> None:
    backend = plant("quantize", one_element)
    with te_hal.shadow(backend, folder=tmp_path) as shadow, pytest.warns(ShadowWarning):
        ops.quantize_current(torch.randn(16, 32), dtype=torch.float8_e4m3fn)
    assert shadow.difference.op == "quantize"


def test_a_dropped_nan_is_a_difference_and_a_kept_one_is_none(tmp_path) -> None:
    x = torch.randn(16, 32)
    x[3, 4] = float("nan")
    with te_hal.shadow(folder=tmp_path) as shadow:
        ops.gemm(x, x)
    assert shadow.difference is None
    backend = plant("gemm", nan_dropped)
    with te_hal.shadow(backend, folder=tmp_path) as shadow, pytest.warns(ShadowWarning, match="gemm"):
        ops.gemm(x, x)


def test_a_sum_that_cancels_is_judged_by_what_it_is_made_of(tmp_path) -> None:
    """Another order of summation changes such a result by more than any share of it."""

    def summed_backwards(a, b, *, bias=None, out=None, layout="fprop", accumulate=False, out_dtype=None):
        del bias, out, layout, accumulate, out_dtype
        return a.flip(1) @ b.flip(1).t()

    register_backend(stub("backwards", kernels={"gemm": summed_backwards}))
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(64, 512, generator=generator)
    a, b = torch.cat([half, -half], 1), torch.randn(64, 512, generator=generator).repeat(1, 2)
    with te_hal.shadow("backwards", folder=tmp_path) as shadow:
        result = ops.gemm(a, b)
    assert result.abs().max() > 0
    assert (shadow.cost.compared, shadow.difference) == (1, None)


def test_raise_ends_the_training_with_the_four_facts(tmp_path) -> None:
    backend = plant("gemm", one_percent)
    shadow = te_hal.shadow(backend, on_difference="raise", folder=tmp_path)
    with shadow, pytest.raises(ShadowError, match=r"got a result outside its contract.*te-hal replay"):
        train(None, shadow)
    assert shadow.difference.file.exists()


def test_a_difference_is_reported_although_its_inputs_cannot_be_saved(tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")
    backend = plant("gemm", one_percent)
    with te_hal.shadow(backend, folder=tmp_path / "taken") as shadow, pytest.warns(ShadowWarning, match="not be saved"):
        ops.gemm(torch.randn(8, 8), torch.randn(8, 8))
    assert shadow.difference.file is None


def test_every_and_sample_choose_what_is_compared() -> None:
    x = torch.randn(4)
    with te_hal.shadow(every=3) as shadow:
        for _ in range(7):
            ops.amax(x)
            shadow.step()
    assert (shadow.cost.ops["amax"].seen, shadow.cost.ops["amax"].compared) == (7, 3)  # steps 1, 3 and 6
    compared = []
    for seed in (0, 0, 1):
        with te_hal.shadow(sample=0.25, seed=seed) as shadow:
            for _ in range(400):
                ops.amax(x)
        compared.append(shadow.cost.compared)
    assert compared[0] == compared[1]
    assert all(60 < number < 140 for number in compared)


def test_what_the_reference_lacks_is_left_out_by_name() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    with te_hal.shadow(reference="picky") as shadow:
        ops.amax(torch.ones(4))
    assert "it is Sunday" in shadow.cost.left_out["amax"]
    assert "not compared: amax" in shadow.report()


def test_nothing_is_compared_after_the_block() -> None:
    layer, x = te.Linear(32, 32), torch.randn(16, 32)
    with te_hal.shadow() as shadow:
        y = layer(x)
    seen = shadow.cost.ops["gemm"].compared
    y.sum().backward()  # bound inside, runs outside
    layer(x)
    ops.amax(x)
    assert shadow.cost.ops["gemm"].compared == seen == 1
    assert "amax" not in shadow.cost.ops


def test_the_report_has_counts_and_cost() -> None:
    with te_hal.shadow() as shadow:
        ops.amax(torch.ones(4))
        inside = shadow.report()
    for text in (inside, shadow.report()):
        first, counts, cost, *_ = text.splitlines()
        assert first == "te_hal.shadow: the backend in force beside cpu_reference"
        assert counts == "1 of 1 op calls compared, 0 outside their contracts"
        assert cost.startswith("cost ")
    assert 0 < shadow.cost.seconds < shadow.cost.seconds_in_block


def test_operands_written_in_place_are_compared_and_written_once() -> None:
    out = torch.full((8, 8), 2.0)
    a = torch.eye(8)
    with te_hal.shadow() as shadow:
        ops.gemm(a, a, out=out, accumulate=True)
    assert torch.equal(out, torch.full((8, 8), 2.0) + torch.eye(8))
    assert (shadow.cost.compared, shadow.difference) == (1, None)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"every": 0}, "from 1"),
        ({"every": True}, "from 1"),
        ({"sample": 0.0}, "above 0"),
        ({"sample": 2}, "up to 1"),
        ({"on_difference": "shout"}, "'raise'"),
        ({"backend": "cpu_reference"}, "other than 'cpu_reference'"),
    ],
)
def test_options_out_of_range_are_refused(given, names) -> None:
    with pytest.raises(ArgumentError, match=names):
        te_hal.shadow(**given)


def test_an_unknown_backend_or_reference_is_refused_on_entry_and_changes_nothing() -> None:
    for given in ({"backend": "abacus"}, {"reference": "abacus"}):
        with pytest.raises(BackendNotFoundError, match="abacus"), te_hal.shadow(**given):
            pass
    assert te_hal.dispatch.current_selection().observer is None


def test_a_block_is_entered_once() -> None:
    shadow = te_hal.shadow()
    with shadow, pytest.raises(StateError, match="one block"), shadow:
        pass


def test_a_block_inside_use_backend_keeps_that_backend(tmp_path) -> None:
    with te_hal.use_backend("null"), te_hal.shadow(folder=tmp_path) as shadow, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShadowWarning)
        ops.amax(torch.ones(4))
    assert shadow.cost.compared == 1
    assert [(row.op, row.backend) for row in te_hal.report().rows] == [("amax", "null")]


@pytest.mark.slow
def test_a_hundredth_of_the_calls_costs_less_than_a_tenth_of_the_training() -> None:
    net = te.TransformerLayer(256, 1024, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16)
    x = torch.randn(256, 1, 256).bfloat16()
    with te_hal.shadow(sample=0.01) as shadow:
        for _ in range(60):
            with te.autocast(recipe=recipe.DelayedScaling()):
                y = net(x)
            y.float().square().mean().backward()
            shadow.step()
    assert shadow.cost.compared > 10
    assert shadow.cost.seconds < 0.1 * (shadow.cost.seconds_in_block - shadow.cost.seconds)
