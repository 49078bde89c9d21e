"""State of te.ops: keys, round trips, weights in FP8, recompute, main_grad."""

from __future__ import annotations

import copy

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe

H, F, ROWS = 32, 64, 32
RECIPES = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
}


def mlp(**arguments):
    return te.ops.Sequential(
        te.ops.RMSNorm(H, dtype=torch.bfloat16),
        te.ops.Linear(H, F, dtype=torch.bfloat16, **arguments),
        te.ops.GELU(),
        te.ops.BasicLinear(F, H, dtype=torch.bfloat16),
    )


def train(model, chosen, count, *, run=None, seed=0):
    """Outputs and gradients of some steps of gradient descent, each from numbers of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x, gy = (torch.randn(ROWS, H, generator=generator).bfloat16() for _ in range(2))
        inp = x.requires_grad_()
        model.zero_grad()
        with te.autocast(recipe=chosen):
            y = model(inp) if run is None else run(model, inp)
        y.backward(gy)
        found += [y.detach(), inp.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.dequantize() if isinstance(parameter, te.QuantizedTensor) else parameter)
                    parameter.sub_(0.1 * parameter.grad)
    return found


def equal(found, wanted):
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_keys_are_those_of_transformer_engine():
    assert list(mlp().state_dict()) == [
        "0.weight",
        "0._extra_state",
        "1.basic_ops.0.weight",
        "1.basic_ops.0._extra_state",
        "1.basic_ops.1.bias",
        "1.basic_ops.1._extra_state",
        "2._extra_state",
        "3.weight",
        "3._extra_state",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_training_goes_on_from_a_state_dict_bit_for_bit(name):
    model = mlp()
    train(model, RECIPES[name](), 2)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    assert all(value.dtype == torch.uint8 for key, value in saved.items() if key.endswith("_extra_state"))
    other = mlp()
    other.load_state_dict(saved)
    assert equal(train(model, RECIPES[name](), 2, seed=1), train(other, RECIPES[name](), 2, seed=1))


def test_delayed_state_has_a_history_of_each_operand():
    model = mlp()
    train(model, RECIPES["delayed"](), 2)
    for linear in (model[1].basic_ops[0], model[3]):
        forward, backward = linear.fp8_meta["scaling_fwd"], linear.fp8_meta["scaling_bwd"]
        assert (forward.amax_history[:, :2] > 0).any(0).all()
        assert (backward.amax_history[:, 0] > 0).any()
        assert (linear.num_quantizers("forward"), linear.num_quantizers("backward")) == (2, 1)
        assert torch.equal(linear.get_quantizer("forward", 1).scale.view(()), forward.scale[1])
        assert torch.equal(linear.get_quantizer("backward", 0).scale.view(()), backward.scale[0])


def test_weights_of_torchs_linear_load_and_the_dict_stays_as_it_was():
    plain = torch.nn.Linear(H, F)
    saved = plain.state_dict()
    op = te.ops.Linear(H, F)
    op.load_state_dict(saved)
    assert torch.equal(op.weight, plain.weight)
    assert torch.equal(op.bias, plain.bias)
    assert list(saved) == ["weight", "bias"]
    model = te.ops.Sequential(te.ops.Linear(H, F), te.ops.ReLU())
    model.load_state_dict(torch.nn.Sequential(plain, torch.nn.ReLU()).state_dict())
    assert torch.equal(model[0].weight, plain.weight)


def test_assigning_a_parameter_replaces_that_of_the_op_that_owns_it():
    op = te.ops.Linear(H, F)
    op.weight, op.bias = torch.nn.Parameter(torch.ones(F, H)), torch.nn.Parameter(torch.ones(F))
    assert op.basic_ops[0].weight is op.weight
    assert torch.equal(op(torch.ones(1, H)), torch.full((1, F), H + 1.0))
    assert list(op.state_dict())[:1] == ["basic_ops.0.weight"]


def test_a_damaged_state_is_refused_before_anything_has_changed():
    model = mlp()
    train(model, RECIPES["delayed"](), 1)
    saved = copy.deepcopy(model.state_dict())
    saved["3._extra_state"][-1] ^= 1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"3\._extra_state"):
        te.check_extra_states(model, saved)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", RECIPES)
def test_weights_that_live_in_fp8_give_the_first_step_of_weights_quantized_at_each_step(name):
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=RECIPES[name](), preserve_high_precision_init_val=True):
        model = mlp()
    plain = mlp()
    weights = [model[1].weight, model[3].weight]
    assert all(isinstance(weight, te.QuantizedTensor) for weight in weights)
    assert isinstance(model[0].weight, torch.nn.Parameter)
    assert not isinstance(model[1].bias, te.QuantizedTensor)
    with torch.no_grad():
        for mine, its in zip(plain.parameters(), model.parameters(), strict=True):
            quantized = isinstance(its, te.QuantizedTensor)
            mine.copy_(its.get_high_precision_init_val() if quantized else its)
    assert equal(train(model, RECIPES[name](), 1), train(plain, RECIPES[name](), 1))


def test_a_model_with_weights_in_fp8_goes_on_from_its_state():
    with te.quantized_model_init(recipe=RECIPES["delayed"]()):
        model, other = mlp(), mlp()
    train(model, RECIPES["delayed"](), 2)
    other.load_state_dict(model.state_dict())
    assert equal(train(model, RECIPES["delayed"](), 2, seed=1), train(other, RECIPES["delayed"](), 2, seed=1))


@pytest.mark.parametrize("form", ["te", "torch", "torch reentrant"])
@pytest.mark.parametrize("name", RECIPES)
def test_recompute_changes_no_byte_and_no_state(name, form):
    model = te.ops.Sequential(te.ops.Quantize(forward=False, backward=True), *mlp())
    other = copy.deepcopy(model)

    def run(ops, inp):
        if form == "te":
            return te.checkpoint(ops, inp, use_reentrant=False)
        return torch.utils.checkpoint.checkpoint(ops, inp, use_reentrant=form == "torch reentrant")

    assert equal(train(model, RECIPES[name](), 3), train(other, RECIPES[name](), 3, run=run))
    assert equal(list(model.state_dict().values()), list(other.state_dict().values()))


def test_weight_gradients_add_up_in_main_grad():
    model, plain = mlp(accumulate_into_main_grad=True), mlp()
    plain.load_state_dict(model.state_dict())
    weight = model[1].weight
    weight.main_grad = torch.full((F, H), 0.5)
    x, gy = torch.randn(ROWS, H, dtype=torch.bfloat16), torch.randn(ROWS, H, dtype=torch.bfloat16)
    model(x).backward(gy)
    plain(x).backward(gy)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 0.5, plain[1].weight.grad.float(), rtol=1e-2, atol=1e-2)


def test_calibrating_records_what_a_later_region_scales_by():
    model, x = mlp(), torch.randn(ROWS, H, dtype=torch.bfloat16)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
        model(x)
    first, second = (op.fp8_meta["scaling_fwd"].amax_history[0] for op in (model[1].basic_ops[0], model[3]))
    normed = model[0](x)
    assert first[0] == normed.abs().max()
    assert first[1] == model[1].weight.abs().max()
    assert second[0] == model[2](model[1](normed)).abs().max()


def test_a_copied_and_a_pickled_model_compute_the_same(tmp_path):
    model = mlp()
    train(model, RECIPES["delayed"](), 2)
    torch.save(model, tmp_path / "model.pt")
    others = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    wanted = train(model, RECIPES["delayed"](), 1)
    assert all(equal(train(other, RECIPES["delayed"](), 1), wanted) for other in others)
