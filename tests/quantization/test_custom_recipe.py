"""CustomRecipe: what its factory is asked, what it may answer, and that every change of it is noticed."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16

MODULES = {
    "Linear": lambda name=None: te.Linear(160, 96, params_dtype=BF16, name=name),
    "LayerNormLinear": lambda name=None: te.LayerNormLinear(160, 96, params_dtype=BF16, name=name),
    "LayerNormMLP": lambda name=None: te.LayerNormMLP(160, 96, params_dtype=BF16, name=name),
}
READY = {
    "delayed": (factories.delayed_scaling_factory, recipe.DelayedScaling),
    "current": (factories.current_scaling_factory, recipe.Float8CurrentScaling),
    "block": (factories.float8_block_scaling_factory, recipe.Float8BlockScaling),
    "mxfp8": (factories.mxfp8_factory, recipe.MXFP8BlockScaling),
    "mtfp8": (factories.mtfp8_block_scaling_factory, recipe.MTFP8BlockScaling),
}


def made(name: str, *, seed: int = 0, label: str | None = None) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODULES[name](label)


def steps(module: torch.nn.Module, chosen: recipe.Recipe | None, count: int = 1, first: int = 0) -> list[torch.Tensor]:
    """y, gx and parameter gradients of the last of some steps, each with inputs of its own."""
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        module.zero_grad()
        x = (torch.randn(64, 160, generator=generator) * (1 + number)).to(BF16).requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(torch.randn(y.shape, generator=generator).to(BF16))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# What the factory is asked


def asked_about(module: torch.nn.Module, **roles: te.QuantizerRole) -> list[str]:
    asked: list[te.QuantizerRole | None] = []
    for name, role in roles.items():
        setattr(module, name, role)

    def factory(role: te.QuantizerRole | None) -> te.Quantizer:
        asked.append(role)
        return te.IdentityQuantizer()

    chosen = recipe.CustomRecipe(qfactory=factory)
    steps(module, chosen, 3)
    return [str(role) for role in asked]


def test_each_slot_is_asked_about_once_forward_before_backward():
    kind = "module_type=linear|tensor_type="
    assert asked_about(made("Linear")) == [f"{kind}input", f"{kind}weight", "None", f"{kind}grad_output", "None"]
    assert asked_about(made("LayerNormLinear", label="qkv")) == [
        f"{kind}input|name=qkv",
        f"{kind}weight|name=qkv",
        "None",
        f"{kind}grad_output|name=qkv",
        "None",
    ]


def test_the_products_of_a_mlp_have_names_and_what_lies_between_them_the_consumers_role():
    found = asked_about(made("LayerNormMLP", label="mlp"))
    one, two = ("module_type=linear|tensor_type={}|name=mlp." + gemm for gemm in ("fc1", "fc2"))
    forward = [one.format("input"), one.format("weight"), two.format("input")]
    forward += [two.format("input"), two.format("weight"), "None"]
    backward = [one.format("grad_output"), "None", two.format("grad_output"), one.format("grad_output")]
    assert found == forward + backward


def test_a_consumers_role_is_asked_about_once_it_is_known():
    consumer = te.QuantizerRole("dpa", "qkv", "attention")
    module = made("Linear")
    assert asked_about(module, output_quantizer_role=consumer)[2] == str(consumer)
    assert asked_about(module, grad_input_quantizer_role=consumer)[4] == str(consumer)


def test_a_role_prints_what_it_knows_and_can_be_a_key():
    assert str(te.QuantizerRole()) == "QuantizerRole()"
    assert str(te.QuantizerRole(tensor_type="weight")) == "tensor_type=weight"
    assert {te.QuantizerRole("linear"): 1}[te.QuantizerRole("linear")] == 1


# What it may answer


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("ready", READY)
def test_a_ready_factory_gives_the_bytes_of_its_recipe(ready, name):
    factory, kind = READY[ready]
    assert equal(steps(made(name), recipe.CustomRecipe(qfactory=factory), 4), steps(made(name), kind(), 4))


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
def test_nothing_is_quantized_where_every_role_stays_in_high_precision(name):
    chosen = recipe.CustomRecipe(qfactory=factories.high_precision_factory)
    assert equal(steps(made(name), chosen), steps(made(name), None))


class Thousandths:
    """A plain Python quantizer: integers of thousandths."""

    def quantize(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.float() * 1000).round().int(), tensor.dtype

    def dequantize(self, made: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
        return made[0].float() / 1000


def test_an_object_with_quantize_and_dequantize_is_a_quantizer():
    module, plain = made("Linear"), made("Linear")
    found = steps(module, recipe.CustomRecipe(qfactory=lambda _: Thousandths()))

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return ((tensor.float() * 1000).round() / 1000).to(BF16)

    generator = torch.Generator().manual_seed(0)
    x, gy = torch.randn(64, 160, generator=generator).to(BF16), torch.randn(64, 96, generator=generator).to(BF16)
    weight = plain.weight.detach()
    y = rounded(x).double() @ rounded(weight).double().T
    products = (y, rounded(gy).double() @ rounded(weight).double(), rounded(gy).double().T @ rounded(x).double())
    for result, exact in zip(found, products, strict=False):
        assert (result.double() - exact).norm() <= 3e-3 * exact.norm()
    assert torch.equal(found[3], gy.float().sum(0).to(BF16))


def by_role(**quantizers: object) -> object:
    """A factory: a quantizer per tensor type, the rest unquantized."""

    def factory(role: te.QuantizerRole | None) -> object:
        made = quantizers.get(role.tensor_type if role is not None else "")
        return te.IdentityQuantizer() if made is None else made()

    return factory


MIXED = {
    "weight only": by_role(weight=lambda: te.MXFP8Quantizer(E4M3)),
    "forward only": by_role(
        input=lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1), weight=lambda: te.Float8BlockQuantizer(E4M3)
    ),
    "gradients only": by_role(grad_output=lambda: te.Float8CurrentScalingQuantizer(E5M2)),
    "delayed and current": by_role(
        input=te.DelayedScalingRequest, weight=lambda: te.Float8CurrentScalingQuantizer(E4M3), grad_output=Thousandths
    ),
    "delayed gradients": by_role(grad_output=te.DelayedScalingRequest),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mixed", MIXED)
def test_quantized_and_plain_operands_mix(mixed, name):
    module = made(name)
    reference = steps(made(name), None, 4)
    for result, exact in zip(steps(module, recipe.CustomRecipe(qfactory=MIXED[mixed]), 4), reference, strict=True):
        assert (result.double() - exact.double()).norm() <= 0.1 * exact.double().norm()
        assert result.isfinite().all()


def test_each_operand_has_the_format_that_its_role_was_given():
    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=MIXED["delayed and current"]))
    (plan,) = module._plans
    assert [str(of) for of in plan.key.formats] == ["E4M3/tensor/delayed", "E4M3/tensor", "None", "None", "None"]
    state = module.fp8_meta["scaling_fwd"]
    assert state.delayed.scale.shape == (1,)
    assert module.fp8_meta["scaling_bwd"].delayed is None


def test_one_quantizer_may_serve_several_roles():
    shared = te.Float8CurrentScalingQuantizer(E4M3)
    found = steps(made("Linear"), recipe.CustomRecipe(qfactory=lambda _: shared))
    assert equal(found, steps(made("Linear"), recipe.Float8CurrentScaling(fp8_format=recipe.Format.E4M3)))
    assert shared.get_usages() == {"rowwise": True, "columnwise": True}


def test_a_quantized_result_is_made_by_the_output_role():
    module = made("Linear")
    module.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
    chosen = recipe.CustomRecipe(qfactory=factories.mxfp8_factory)
    with te.autocast(recipe=chosen):
        assert type(module(torch.ones(64, 160, dtype=BF16), fp8_output=True)) is te.MXFP8Tensor
    module.output_quantizer_role = None
    plain = recipe.CustomRecipe(qfactory=by_role(input=lambda: te.Float8CurrentScalingQuantizer(E4M3)))
    with te.autocast(recipe=plain):
        assert type(module(torch.ones(64, 160, dtype=BF16), fp8_output=True)) is torch.Tensor


# What is refused


def forward(module: torch.nn.Module, factory: object) -> None:
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        module(torch.ones(64, 160, dtype=BF16))


class OnlyQuantizes:
    def quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class MultipliesItself(Thousandths):
    custom = True


class Unknown(te.QuantizerRequest):
    pass


def test_everything_that_is_missing_is_listed_at_once_and_nothing_has_changed():
    answers = iter([None, OnlyQuantizes(), object(), Unknown(), te.IdentityQuantizer])
    module = made("Linear", label="fc")
    steps(module, recipe.MXFP8BlockScaling())
    with pytest.raises(ArgumentError, match=r"Linear 'fc': CustomRecipe\.qfactory") as raised:
        forward(module, lambda _: next(answers))
    got = raised.value.got
    assert "scaling_fwd slot 0 (module_type=linear|tensor_type=input|name=fc) None" in got
    assert "slot 1 (module_type=linear|tensor_type=weight|name=fc) a OnlyQuantizes without dequantize" in got
    assert "slot 2 (None) a object without quantize and dequantize" in got
    assert "scaling_bwd slot 0 (module_type=linear|tensor_type=grad_output|name=fc) a Unknown" in got
    assert "slot 1 (None) the class IdentityQuantizer in place of an object" in got
    assert module.fp8_meta["recipe"] == recipe.MXFP8BlockScaling()


def test_a_quantizer_that_multiplies_by_itself_is_refused_by_name():
    with pytest.raises(ArgumentError, match="qgemm"):
        forward(made("Linear"), lambda _: MultipliesItself())


def test_unequal_requests_are_refused():
    factory = by_role(
        input=lambda: te.DelayedScalingRequest(margin=1), weight=te.DelayedScalingRequest, grad_output=Thousandths
    )
    with pytest.raises(ArgumentError, match=r"2 different requests.*margin=1"):
        forward(made("Linear"), factory)


def test_families_that_do_not_multiply_are_refused_by_name():
    factory = by_role(input=lambda: te.MXFP8Quantizer(E4M3), weight=lambda: te.Float8BlockQuantizer(E4M3))
    with pytest.raises(UnsupportedError, match="'block_128x128' and 'mxfp8'"):
        forward(made("Linear"), factory)


def test_a_dequantize_of_another_shape_is_refused():
    class Wrong(Thousandths):
        def dequantize(self, made: object) -> torch.Tensor:  # noqa: ARG002
            return torch.ones(2)

    with pytest.raises(ArgumentError, match=r"Wrong.dequantize.*\(96, 160\)"):
        forward(made("Linear"), lambda _: Wrong())


def test_an_error_of_the_factory_comes_out_as_it_is():
    def factory(role: object) -> None:  # noqa: ARG001
        raise KeyError("mine")

    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)), pytest.raises(KeyError, match="mine"):
        made("Linear")(torch.ones(64, 160, dtype=BF16))


BAD = {
    "no callable": ({"qfactory": 3}, ArgumentTypeError, "qfactory"),
    "format": ({"fp8_format": recipe.Format.E4M3}, UnsupportedError, "fp8_format"),
    "attention": ({"fp8_dpa": True}, UnsupportedError, "fp8_dpa"),
    "override": ({"backward_override": "dequantized"}, UnsupportedError, "backward_override"),
    "alignment": ({"quantization_alignment": 0}, ArgumentError, "quantization_alignment"),
    "another alignment": ({"quantization_alignment": 64}, UnsupportedError, "quantization_alignment"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_refused_by_name(case):
    fields, error, name = BAD[case]
    with pytest.raises(error, match=f"CustomRecipe.{name}"):
        recipe.CustomRecipe(**{"qfactory": factories.mxfp8_factory, **fields})


def test_a_request_is_checked_as_its_recipe_is():
    with pytest.raises(ArgumentError, match="amax_history_len"):
        te.DelayedScalingRequest(amax_history_len=0)


# Changes


def with_format(dtype: torch.dtype) -> object:
    return lambda _: te.Float8CurrentScalingQuantizer(dtype)


def test_another_factory_on_the_same_object_is_noticed():
    chosen, module = recipe.CustomRecipe(qfactory=factories.mxfp8_factory), made("Linear")
    with te.autocast(recipe=chosen):
        module(torch.ones(64, 160, dtype=BF16), is_first_microbatch=True)
    chosen.qfactory = with_format(E5M2)
    with pytest.warns(UserWarning, match="quantized anew"):
        found = steps(module, chosen)
    assert equal(found, steps(made("Linear"), recipe.CustomRecipe(qfactory=with_format(E5M2))))
    assert not module._fp8_workspaces


SETTINGS = {"dtype": E4M3}


def from_globals(role: object) -> te.Quantizer:  # noqa: ARG001
    return te.Float8CurrentScalingQuantizer(SETTINGS["dtype"])


class Holder:
    def __init__(self) -> None:
        self.dtype = E4M3

    def __call__(self, role: object) -> te.Quantizer:  # noqa: ARG002
        return te.Float8CurrentScalingQuantizer(self.dtype)


def changeable(kind: str) -> tuple[object, object]:
    """A factory, and what changes its answers from E4M3 to E5M2 without changing the object."""
    dtype, kept = E4M3, {"dtype": E4M3}

    def from_closure(role: object) -> te.Quantizer:  # noqa: ARG001
        return te.Float8CurrentScalingQuantizer(dtype)

    def rebind() -> None:
        nonlocal dtype
        dtype = E5M2

    def from_mapping(role: object) -> te.Quantizer:  # noqa: ARG001
        return te.Float8CurrentScalingQuantizer(kept["dtype"])

    holder = Holder()
    return {
        "closure": (from_closure, rebind),
        "mapping in a closure": (from_mapping, lambda: kept.update(dtype=E5M2)),
        "global": (from_globals, lambda: SETTINGS.update(dtype=E5M2)),
        "attribute": (holder, lambda: setattr(holder, "dtype", E5M2)),
        "partial": (functools.partial(from_mapping), lambda: kept.update(dtype=E5M2)),
    }[kind]


@pytest.mark.parametrize("kind", ["closure", "mapping in a closure", "global", "attribute", "partial"])
def test_a_factory_that_changes_inside_is_asked_again(kind, monkeypatch):
    monkeypatch.setitem(SETTINGS, "dtype", E4M3)
    factory, change = changeable(kind)
    chosen, module = recipe.CustomRecipe(qfactory=factory), made("Linear")
    assert equal(steps(module, chosen), steps(made("Linear"), recipe.CustomRecipe(qfactory=with_format(E4M3))))
    change()
    assert equal(steps(module, chosen), steps(made("Linear"), recipe.CustomRecipe(qfactory=with_format(E5M2))))


def test_a_factory_that_stays_is_not_asked_again():
    calls = []

    def factory(role: object) -> te.Quantizer:
        calls.append(role)
        return te.IdentityQuantizer()

    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=factory), 3)
    steps(module, recipe.CustomRecipe(qfactory=factory), 3)
    assert len(calls) == 5


LOG: list[str] = []


def logging_factory(role: te.QuantizerRole | None) -> te.Quantizer:
    LOG.append(str(role))
    return te.MXFP8Quantizer(E4M3)


@pytest.mark.parametrize(
    "factory",
    [logging_factory, by_role(weight=Thousandths, input=lambda: te.Float8CurrentScalingQuantizer(E5M2))],
    ids=["that keeps a record", "that makes objects"],
)
def test_answers_that_stay_keep_quantizers_and_weights(factory):
    """Modules share a factory: what one of them asks is a change to the other, yet nothing that matters."""
    first, second = made("Linear"), made("Linear", seed=1)
    x = torch.randn(64, 160, dtype=BF16)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        first(x, is_first_microbatch=True)
        second(x, is_first_microbatch=True)
    kept = dict(first._fp8_workspaces), first.quantizers["scaling_fwd"][0]
    LOG.append("a change")
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        first(x, is_first_microbatch=False)
    assert first._fp8_workspaces == kept[0]
    assert first.quantizers["scaling_fwd"][0] is kept[1]


# State


def test_the_state_behind_requests_survives_a_change_of_other_roles():
    module = made("Linear")
    requests = {"input": te.DelayedScalingRequest, "grad_output": te.DelayedScalingRequest}
    steps(module, recipe.CustomRecipe(qfactory=by_role(**requests)), 3)
    before = module.fp8_meta["scaling_fwd"].delayed
    steps(
        module, recipe.CustomRecipe(qfactory=by_role(**requests, weight=lambda: te.Float8CurrentScalingQuantizer(E5M2)))
    )
    assert module.fp8_meta["scaling_fwd"].delayed is before


def resumed(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """Another module that has loaded the state through a file, without pickle."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = made(name, seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mixed", ["delayed and current", "delayed gradients"])
def test_saved_steps_go_on_bit_for_bit(mixed, name):
    chosen = recipe.CustomRecipe(qfactory=MIXED[mixed])
    straight, halfway = made(name), made(name)
    expected = steps(straight, chosen, 6)
    steps(halfway, chosen, 3)
    other = resumed(halfway, name)
    assert torch.equal(other.get_extra_state(), halfway.get_extra_state())
    assert equal(steps(other, chosen, 3, first=3), expected)
    assert torch.equal(other.get_extra_state(), straight.get_extra_state())


def test_the_state_of_a_module_without_requests_has_no_bytes():
    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=factories.mxfp8_factory))
    assert module.get_extra_state().numel() == 0


def test_a_loaded_state_of_other_slots_is_refused():
    module = made("Linear")
    steps(module, recipe.CustomRecipe(qfactory=MIXED["delayed gradients"]))
    other = resumed(module, "Linear")
    with pytest.raises(StateError, match=r"slots \[0\], whose state was loaded"):
        steps(other, recipe.CustomRecipe(qfactory=factories.mxfp8_factory))
    other.forget_scaling_state()
    steps(other, recipe.CustomRecipe(qfactory=factories.mxfp8_factory))


@pytest.mark.parametrize("remake", [copy.deepcopy], ids=["deepcopy"])
def test_a_copied_module_goes_on_as_the_original(remake):
    chosen = recipe.CustomRecipe(qfactory=MIXED["delayed and current"])
    module = made("Linear")
    steps(module, chosen, 3)
    assert equal(steps(remake(module), chosen, 2, first=3), steps(module, chosen, 2, first=3))


def test_calibrating_leaves_results_unquantized_and_raises_the_amax_of_requests():
    module = made("Linear")
    chosen = recipe.CustomRecipe(qfactory=by_role(input=te.DelayedScalingRequest))
    x = torch.full((64, 160), -5.0, dtype=BF16)
    with te.autocast(enabled=False, calibrating=True, recipe=chosen):
        y = module(x)
    assert torch.equal(y, module(x))
    assert module.fp8_meta["scaling_fwd"].delayed.amax_history[0].tolist() == [5.0]


# IdentityQuantizer


def test_identity_gives_the_tensor_itself_or_rounds_it():
    x = torch.randn(4, 4, requires_grad=True)
    assert te.IdentityQuantizer()(x) is x
    assert te.IdentityQuantizer(dtype=BF16)(x).dtype is BF16
    te.IdentityQuantizer(dtype=BF16)(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))
    with pytest.raises(StateError, match="without codes"):
        te.IdentityQuantizer().quantize_storage(x)
    with pytest.raises(ArgumentError, match="IdentityQuantizer: dtype"):
        te.IdentityQuantizer(dtype=torch.int8)


def test_an_identity_that_rounds_does_so_to_what_products_take():
    module = te.Linear(160, 96)
    x = torch.randn(64, 160)
    chosen = recipe.CustomRecipe(qfactory=by_role(input=lambda: te.IdentityQuantizer(dtype=BF16)))
    with te.autocast(recipe=chosen):
        found = module(x)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factories.high_precision_factory)):
        assert torch.equal(found, module(x.bfloat16().float()))
