"""GroupedLinear: each group of rows by its own layer, whatever the recipe, the splits and the shape of parameters."""

from __future__ import annotations

import copy
import io

import closeness
import pytest
import torch
from grouped_layers import (
    INS,
    OUTS,
    RECIPES,
    Step,
    autocast,
    biases_of,
    data,
    gradient,
    grouped,
    same,
    singles,
    step,
    step_of_singles,
    weights_of,
)
from native_backends import emulator

import te_hal
import te_hal.modules as te
from te_hal import recipe

ALL = pytest.mark.parametrize("name", RECIPES)
FP8 = pytest.mark.parametrize("name", [name for name in RECIPES if name != "none"])
SPLITS = {
    "equal": [32, 32, 32, 32],
    "unequal": [64, 32, 96, 32],
    "empty_inside": [32, 0, 64, 0],
    "empty_first": [0, 64, 0, 32],
    "one_has_all": [0, 0, 0, 128],
}


@ALL
@pytest.mark.parametrize("which", SPLITS)
def test_each_group_is_a_linear_layer_of_its_own_bit_for_bit(which, name):
    module, splits = grouped(), SPLITS[which]
    layers, chosen = singles(module), RECIPES[name] and RECIPES[name]()
    for number in range(3):
        x, gy = data(sum(splits), number)
        found = step(module, splits, x, gy, chosen)
        assert same(found, step_of_singles(layers, splits, x, gy, chosen))


@pytest.mark.parametrize("which", SPLITS)
def test_unquantized_results_are_those_of_float64_up_to_one_rounding(which):
    module, splits = grouped(params_dtype=torch.float32), SPLITS[which]
    x, gy = data(sum(splits), dtype=torch.float32)
    found = step(module, splits, x, gy)
    exact: list[list[torch.Tensor]] = [[], [], [], []]
    parts = zip(weights_of(module), biases_of(module), x.double().split(splits), gy.double().split(splits), strict=True)
    for weight, bias, rows, grads in parts:
        exact[0].append(rows @ weight.double().T + bias.double())
        exact[1].append(grads @ weight.double())
        exact[2].append(grads.T @ rows)
        exact[3].append(grads.sum(0))
    pairs = [(found.output, torch.cat(exact[0])), (found.grad_input, torch.cat(exact[1]))]
    pairs += [*zip(found.grad_weights, exact[2], strict=True), *zip(found.grad_biases, exact[3], strict=True)]
    for value, of in pairs:
        assert closeness.roundings(value, of, 5e-6 * of.abs().max().clamp_min(1e-30)) <= 1


@ALL
def test_gradients_of_groups_without_rows_are_exactly_zero_whatever_memory_held(name):
    module, splits = grouped(), [32, 0, 32, 0]
    for poisoned in range(3):
        junk = [torch.full((OUTS, INS), float("nan"), dtype=torch.bfloat16) for _ in range(8)]
        del junk
        found = step(module, splits, *data(64, poisoned), RECIPES[name] and RECIPES[name]())
        for number in (1, 3):
            assert not found.grad_weights[number].any()
            assert not found.grad_biases[number].any()
        assert all(value.isfinite().all() for value in (*found.grad_weights, found.grad_input, found.output))


def test_no_rows_at_all_give_an_empty_result_and_zeros():
    found = step(grouped(), [0, 0, 0, 0], *data(0), recipe.DelayedScaling())
    assert found.output.shape == (0, OUTS)
    assert found.grad_input.shape == (0, INS)
    assert not any(value.any() for value in found.grad_weights)


@ALL
def test_rows_of_no_group_give_zeros_and_change_nothing_else(name):
    module, splits, chosen = grouped(), [32, 0, 64, 32], RECIPES[name] and RECIPES[name]()
    x, gy = data(160)
    x[128:], gy[128:] = float("nan"), float("nan")
    found = step(module, splits, x, gy, chosen)
    assert not found.output[128:].any()
    assert not found.grad_input[128:].any()
    module = grouped()
    alone = step(module, splits, x[:128], gy[:128], RECIPES[name] and RECIPES[name]())
    assert same(found._replace(output=found.output[:128], grad_input=found.grad_input[:128]), alone)


@pytest.mark.parametrize("name", ["none", "delayed", "block"])
@pytest.mark.parametrize("stacked", ["weight", "bias", "both"])
def test_stacked_parameters_get_the_gradients_of_separate_ones(stacked, name):
    arguments = {
        "single_grouped_weight": stacked in ("weight", "both"),
        "single_grouped_bias": stacked in ("bias", "both"),
    }
    separate, module, splits = grouped(), grouped(**arguments), [32, 0, 64, 32]
    with torch.no_grad():
        for target, source in zip(biases_of(module), biases_of(separate), strict=True):
            target.copy_(source)
    assert torch.equal(torch.stack(weights_of(module)), torch.stack(weights_of(separate)))
    for number in range(2):
        pair = [
            step(each, splits, *data(128, number), RECIPES[name] and RECIPES[name]()) for each in (module, separate)
        ]
        assert same(*pair)


def fused(stacked: bool, starts_at: float = 0.5) -> te.GroupedLinear:
    module = grouped(fuse_wgrad_accumulation=True, single_grouped_weight=stacked)
    for name in module.weight_names:
        weight = getattr(module, name)
        weight.main_grad = torch.full(weight.shape, starts_at)
    return module


def main_grads(module: te.GroupedLinear) -> list[torch.Tensor]:
    found = [getattr(module, name).main_grad for name in module.weight_names]
    return list(found[0]) if module.single_grouped_weight else found


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_main_grad_adds_and_overwrites_as_flags_say_also_without_rows(name, stacked):
    module, splits = fused(stacked), [32, 0, 64, 32]
    expected = [torch.full((OUTS, INS), 0.5, dtype=torch.float64) for _ in splits]
    chosen = RECIPES[name] and RECIPES[name]()
    for number, flag in enumerate([None, True, False]):
        x, gy = data(128, number)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            module(x, splits, is_first_microbatch=flag).backward(gy)
        for group, (rows, grads) in enumerate(zip(x.split(splits), gy.split(splits), strict=True)):
            before = 0 if flag is True else expected[group]
            expected[group] = before + grads.double().T @ rows.double()
        for found, exact in zip(main_grads(module), expected, strict=True):
            allowed = 1e-5 if name == "none" else 0.08
            assert (found - exact).norm() <= allowed * exact.norm().clamp_min(1e-9)
        assert (main_grads(module)[1] == (0.5 if flag is None else 0.0)).all()
    assert all(getattr(module, weight).grad is None for weight in module.weight_names)


@pytest.mark.parametrize("stacked", [False, True], ids=["separate", "stacked"])
def test_grad_added_to_main_grad_is_set_and_hooks_run_on_zeros(stacked):
    module, seen = fused(stacked), []
    for name in module.weight_names:
        weight = getattr(module, name)
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().max().item()))
    x, gy = data(128)
    module(x, [32, 0, 64, 32]).backward(gy)
    assert seen == [0.0] * len(module.weight_names)
    assert all(getattr(module, name).grad_added_to_main_grad for name in module.weight_names)


@FP8
def test_weights_kept_between_microbatches_change_nothing_and_are_not_quantized_again(name):
    module, other = grouped(), grouped()
    splits, chosen = [32, 0, 64, 32], RECIPES[name]()
    for number, flag in enumerate([True, False, False]):
        x, gy = data(128, number)
        kept = step(module, splits, x, gy, chosen, is_first_microbatch=flag)
        if name != "delayed":  # there a scale moves between microbatches, and kept weights keep theirs
            assert same(kept, step(other, splits, x, gy, RECIPES[name]()))
    assert sorted(module._fp8_workspaces) == [f"weight{group}" for group in range(4)]
    held = dict(module._fp8_workspaces)
    step(module, splits, *data(128), chosen, is_first_microbatch=False)
    assert all(module._fp8_workspaces[key] is value for key, value in held.items())


def test_delayed_scaling_keeps_a_history_of_each_group_and_none_of_rows_that_are_not_there():
    module, splits = grouped(), [32, 0, 64, 32]
    for number in range(2):
        x, gy = data(128, number)
        step(module, splits, x, gy, recipe.DelayedScaling(amax_history_len=4))
        newest = {key: module.fp8_meta[key].amax_history[-1] for key in ("scaling_fwd", "scaling_bwd")}
        for group, (rows, grads) in enumerate(zip(x.split(splits), gy.split(splits), strict=True)):
            largest = [tensor.abs().max().item() if len(tensor) else 0.0 for tensor in (rows, grads)]
            assert newest["scaling_fwd"][3 * group] == largest[0]
            assert newest["scaling_fwd"][3 * group + 1] == weights_of(module)[group].abs().max()
            assert newest["scaling_bwd"][2 * group] == largest[1]
    assert module.fp8_meta["scaling_fwd"].scale.shape == (12,)


@ALL
def test_training_goes_on_from_a_state_dict_bit_for_bit(name):
    module, splits = grouped(), [32, 0, 64, 32]
    make = RECIPES[name]
    step(module, splits, *data(128, 0), make and make())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = te.GroupedLinear(4, INS, OUTS, params_dtype=torch.bfloat16)
    again.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(module)
    expected = step(module, splits, *data(128, 1), make and make())
    for other in (again, copied):
        assert same(expected, step(other, splits, *data(128, 1), make and make()))


def test_a_state_of_another_number_of_groups_is_refused():
    module = grouped()
    step(module, [32] * 4, *data(128), recipe.DelayedScaling())
    state = module.state_dict()["_extra_state"]
    with pytest.raises(RuntimeError, match="_extra_state"):
        grouped(3).set_extra_state(state)


@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8", "mtfp8", "nvfp4"])
def test_weights_that_live_in_fp8_give_the_first_step_of_weights_quantized_at_each_step(name):
    ordinary, splits = grouped(), [32, 0, 64, 32]
    with te.quantized_model_init(recipe=RECIPES[name](), preserve_high_precision_init_val=True):
        module = grouped()
    for live, plain in zip(weights_of(module), weights_of(ordinary), strict=True):
        assert isinstance(live, te.QuantizedTensor)
        assert torch.equal(live.get_high_precision_init_val(), plain.detach())
    found = step(module, splits, *data(128), RECIPES[name]())
    assert same(found, step(ordinary, splits, *data(128), RECIPES[name]()))


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_a_model_with_weights_in_fp8_goes_on_from_its_state_bit_for_bit(name):
    def new() -> te.GroupedLinear:
        with te.quantized_model_init(recipe=RECIPES[name]()):
            return te.GroupedLinear(4, INS, OUTS, params_dtype=torch.bfloat16)

    module, splits = new(), [32, 0, 64, 32]
    step(module, splits, *data(128, 0), RECIPES[name]())
    again = new()
    again.load_state_dict(module.state_dict())
    pair = [step(each, splits, *data(128, 1), RECIPES[name]()) for each in (module, again)]
    assert same(*pair)


@pytest.mark.parametrize(("name", "each"), [("none", 2), ("current", 1), ("delayed", 1)])
def test_groups_with_rows_keep_their_input_and_weight_for_backward_and_nothing_else(name, each):
    module, kept = grouped(bias=False), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, _ = data(96)
    with autocast(name), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x.requires_grad_(), [32, 0, 64, 0])
    of_weights = 2 * OUTS * INS * each
    assert sum(size for size in kept.values() if size > 4) == 96 * INS * each + of_weights
    assert sum(size for size in kept.values() if size <= 4) == (4 * 4 if name != "none" else 0)


def test_return_bias_leaves_the_addition_to_the_caller():
    splits = [32, 0, 64, 32]
    module, adds = grouped(return_bias=True), grouped()
    x, _ = data(128)
    output, biases = module(x, splits)
    assert [tuple(bias.shape) for bias in biases] == [(OUTS,)] * 4
    without = grouped(bias=False)
    assert torch.equal(output, without(x, splits))
    for part, bias, whole in zip(output.split(splits), biases, adds(x, splits).split(splits), strict=True):
        assert torch.allclose((part + bias).float(), whole.float(), atol=2e-2)
    stacked = grouped(return_bias=True, single_grouped_bias=True)
    assert stacked(x, splits)[1] is stacked.bias
    assert [bias.numel() for bias in grouped(return_bias=True, bias=False)(x, splits)[1]] == [0] * 4


def test_results_go_where_the_caller_wants_them_and_leave_rows_of_no_group_alone():
    module, splits = grouped(), [32, 0, 32, 0]
    x, gy = data(80)
    expected = step(module, splits, x, gy)
    out, dgrad_out = (torch.full((80, size), 7.0, dtype=torch.bfloat16) for size in (OUTS, INS))
    x.requires_grad_()
    y = module(x, splits, out=out.detach(), dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    y.backward(gy)
    assert torch.equal(out[:64], expected.output[:64])
    assert torch.equal(dgrad_out[:64], expected.grad_input[:64])
    assert (out[64:] == 7.0).all()
    assert (dgrad_out[64:] == 7.0).all()
    assert torch.equal(x.grad, dgrad_out)


def test_splits_may_be_a_tensor_and_rows_may_have_several_dimensions():
    module = grouped()
    x, _ = data(128)
    expected = module(x, [32, 0, 64, 32])
    assert torch.equal(module(x, torch.tensor([32, 0, 64, 32])), expected)
    assert torch.equal(
        module(x.view(4, 32, INS), torch.tensor([32, 0, 64, 32], dtype=torch.int32)), expected.view(4, 32, -1)
    )


@pytest.mark.parametrize("frozen", ["weight1", "all"])
def test_frozen_weights_get_no_gradient_and_the_others_theirs(frozen):
    module, splits = grouped(), [32, 32, 32, 32]
    expected = step(module, splits, *data(128), recipe.Float8CurrentScaling())
    names = module.weight_names if frozen == "all" else [frozen]
    for name in names:
        getattr(module, name).requires_grad_(False)
    found = step(module, splits, *data(128), recipe.Float8CurrentScaling())
    assert torch.equal(found.grad_input, expected.grad_input)
    for name, one, other in zip(module.weight_names, found.grad_weights, expected.grad_weights, strict=True):
        assert one is None if name in names else torch.equal(one, other)


@pytest.mark.parametrize("name", ["none", "current", "block", "mxfp8"])
def test_an_input_kept_unquantized_gives_the_same_gradients(name):
    module, keeps = grouped(), grouped(save_original_input=True)
    pair = [step(each, [32, 0, 64, 32], *data(128), RECIPES[name] and RECIPES[name]()) for each in (module, keeps)]
    assert same(*pair)


def test_calibrating_records_each_groups_largest_magnitudes_and_computes_unquantized():
    module, splits = grouped(), [32, 0, 64, 32]
    x, _ = data(128)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        y = module(x, splits)
    assert torch.equal(y, module(x, splits))
    running = module.fp8_meta["scaling_fwd"].amax_history[0]
    for group, rows in enumerate(x.split(splits)):
        assert running[3 * group] == (rows.abs().max() if len(rows) else 0)
        assert running[3 * group + 1] == weights_of(module)[group].abs().max()


def test_two_forwards_before_the_backwards_and_no_grad_leave_nothing_behind():
    module, splits = grouped(), [32, 0, 64, 32]
    (x, gy), (other, _) = data(128, 0), data(128, 1)
    expected = step(grouped(), splits, x, gy, recipe.Float8CurrentScaling())
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = module(x.requires_grad_(), splits)
        module(other, splits)
        with torch.no_grad():
            module(other, splits)
    y.backward(gy)
    found = Step(
        y.detach(), x.grad, [gradient(w) for w in weights_of(module)], [gradient(b) for b in biases_of(module)]
    )
    assert same(found, expected)


def test_torchs_autocast_gives_the_activation_dtype():
    module = grouped(params_dtype=torch.float32)
    x, _ = data(128, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, [32, 0, 64, 32])
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert module.weight0.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), autocast("current"):
        assert module(x, [32, 0, 64, 32]).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["none", "delayed", "block", "mxfp8"])
def test_native_kernels_write_each_group_into_its_part_of_the_result(name):
    native, splits, x_gy = emulator(), [32, 0, 64, 32], data(160)  # with rows of no group
    results = []
    for backend in ("cpu_reference", native.name):
        with te_hal.use_backend(backend):
            results.append(step(grouped(), splits, *x_gy, RECIPES[name] and RECIPES[name]()))
    for found, exact in zip(_flat(results[1]), _flat(results[0]), strict=True):
        assert (found.float() - exact.float()).norm() <= 2e-3 * exact.float().norm()


def _flat(found: Step) -> list[torch.Tensor]:
    return [found.output, found.grad_input, *found.grad_weights, *found.grad_biases]


def test_a_shadow_follows_every_product_of_a_group():
    module = grouped()
    x, gy = data(128)
    with te_hal.use_backend(emulator().name), te_hal.shadow() as shadow:
        step(module, [32, 0, 64, 32], x, gy, recipe.DelayedScaling())
    assert shadow.difference is None
    assert "gemm                  9 of 9" in shadow.report()
