"""Modules among torch's own tools: grad modes, hooks, containers, copies, torch.compile, torch.func, threads."""

from __future__ import annotations

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from counting_backend import Counting

import te_hal
import te_hal.modules as te
from te_hal import recipe

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
}
EACH_RECIPE = pytest.mark.parametrize("name", RECIPES)


def under(name: str) -> te.autocast:
    return te.autocast(enabled=name != "none", recipe=RECIPES[name]())


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(te.RMSNorm(32), te.Linear(32, 48), torch.nn.GELU(), te.Linear(48, 16))


@EACH_RECIPE
def test_no_grad_and_inference_mode_give_the_output_of_a_training_forward(name):
    module, x = model(), torch.randn(16, 32)
    outputs = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        run = copy.deepcopy(module)
        with mode(), under(name):
            outputs.append(run(x).clone())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert outputs[2].is_inference()


@EACH_RECIPE
def test_a_first_forward_in_inference_mode_does_not_spoil_training(name):
    trained = model()
    fresh = copy.deepcopy(trained)
    x = torch.randn(16, 32)
    with torch.inference_mode(), under(name):
        trained(x)
    results = []
    for module in (trained, fresh):
        for _ in range(2):
            module.zero_grad()
            with under(name):
                y = module(x)
            y.sum().backward()
        results.append([y, module[1].weight.grad, module[3].weight.grad])
    assert all(map(torch.equal, *results))


@EACH_RECIPE
def test_hooks_of_every_kind_run_and_see_the_right_values(name):
    module, seen = te.Linear(32, 48), {}
    module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    module.register_forward_hook(lambda _, args, out: seen.update(out=out, arg=args[0]))
    module.register_full_backward_pre_hook(lambda _, grads: seen.update(gy=grads[0]))
    module.register_full_backward_hook(lambda _, gx, gy: seen.update(gx=gx[0], gy_again=gy[0]))
    plain = te.Linear(32, 48)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(16, 32, requires_grad=True)
    gy = torch.randn(16, 48)
    with under(name):
        y = module(x)
    y.backward(gy)
    doubled = (x.detach() * 2).requires_grad_()
    with under(name):
        expected = plain(doubled)
    expected.backward(gy)
    assert torch.equal(seen["arg"], doubled)
    assert torch.equal(seen["out"], expected)
    assert torch.equal(y, expected)
    assert torch.equal(seen["gx"], doubled.grad)
    assert torch.equal(seen["gy"], gy)
    assert torch.equal(seen["gy_again"], gy)
    assert torch.equal(x.grad, doubled.grad * 2)
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_full_backward_hooks_pass_quantized_tensors_on():
    module, seen = te.Linear(32, 48), []
    module.register_full_backward_hook(lambda _, gx, gy: seen.append((type(gx[0]), type(gy[0]))))
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        y = module(x, fp8_output=True, fp8_grad=True)
    assert isinstance(y, te.Float8Tensor)
    y.dequantize().sum().backward()
    assert seen == [(te.Float8Tensor, torch.Tensor)]


def test_return_bias_works_with_backward_hooks():
    module = te.Linear(32, 48, return_bias=True)
    module.register_full_backward_hook(lambda *_: None)
    y, bias = module(torch.randn(16, 32, requires_grad=True))
    (y + bias).sum().backward()
    assert module.bias.grad is not None


@EACH_RECIPE
def test_a_deep_copy_trains_on_its_own(name):
    original = model()
    x = torch.randn(16, 32)
    with under(name):
        original(x).sum().backward()
    twin = copy.deepcopy(original)
    before = {key: value.clone() for key, value in original.state_dict().items()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        with under(name):
            loss = twin(x * 3).sum()
        loss.backward()
        optimizer.step()
    after = original.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not torch.equal(twin[1].weight, original[1].weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@EACH_RECIPE
def test_half_and_bfloat16_convert_a_used_module(name, dtype):
    module, x = model(), torch.randn(16, 32)
    with under(name):
        module(x)
    module.to(dtype)
    with under(name):
        y = module(x.to(dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert all(parameter.grad.dtype == dtype for parameter in module.parameters())


def test_functional_call_uses_the_parameters_it_is_given():
    module, x = te.Linear(32, 48), torch.randn(16, 32)
    other = {"weight": torch.randn(48, 32, requires_grad=True), "bias": torch.zeros(48)}
    y = torch.func.functional_call(module, other, (x,))
    assert torch.allclose(y, x @ other["weight"].T, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert other["weight"].grad is not None
    assert module.weight.grad is None


TRANSFORMS = {
    "grad": lambda module, x: torch.func.grad(lambda inp: module(inp).sum())(x),
    "vmap": lambda module, x: torch.func.vmap(module)(x[None]),
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (x,)),
    "jacrev": lambda module, x: torch.func.jacrev(module)(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, from its jvp
@pytest.mark.parametrize("kind", [lambda: te.Linear(32, 48), lambda: te.LayerNorm(32)], ids=["Linear", "LayerNorm"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_refused_by_name(transform, kind):
    with pytest.raises(NotImplementedError, match=r"got a transform of torch.func"):
        TRANSFORMS[transform](kind(), torch.randn(16, 32))


@pytest.fixture
def _quiet_compiler():
    """Hides the compiler's warnings of its own doings; what it does to a module is asserted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_quiet_compiler")
@EACH_RECIPE
def test_torch_compile_runs_modules_as_they_stand(name):
    Counting()  # its kernels fail when they are traced
    te_hal.set_backend("counting")
    eager = model()
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, backend="eager")
    results = []
    for run, module in ((eager, eager), (compiled, traced)):
        for step in range(3):
            module.zero_grad()
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with under(name):
                y = run(x)
            y.sum().backward()
        results.append([y, x.grad, module[1].weight.grad, module[3].weight.grad])
    assert all(map(torch.equal, *results))
    assert torch.equal(eager[1].get_extra_state(), traced[1].get_extra_state())


@pytest.mark.usefixtures("_quiet_compiler")
def test_a_compiled_training_step_runs_the_backward_as_it_stands():
    counting = Counting()
    te_hal.set_backend("counting")
    module = te.Linear(32, 48)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            loss = module(x).square().sum()
        loss.backward()
        return loss

    step(torch.randn(16, 32))
    assert counting.count("gemm", "wgrad") == 1


@pytest.mark.usefixtures("_quiet_compiler")
def test_fullgraph_says_that_a_module_cannot_be_compiled():
    module = torch.compile(te.Linear(32, 48), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        module(torch.randn(16, 32))


def train(index: int, name: str) -> list[torch.Tensor]:
    """A few steps of a model of its own; what they leave."""
    generator = torch.Generator().manual_seed(index)
    module = torch.nn.Sequential(te.LayerNorm(32), te.Linear(32, 48), te.Linear(48, 16))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    chosen = RECIPES[name]()
    for step in range(4):
        x = torch.randn(8 * (1 + index % 3), 32, generator=generator)
        with te.autocast(recipe=chosen):
            y = module(x) if step % 2 else module[2](module[1](module[0](x), is_first_microbatch=True))
        y.square().mean().backward()
    return [y, *(parameter.grad for parameter in module.parameters()), *(m.get_extra_state() for m in module[1:])]


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_sixteen_threads_with_a_model_each_give_the_bytes_of_one_after_the_other(name):
    expected = [train(index, name) for index in range(16)]
    start = threading.Barrier(16)

    def run(index: int) -> list[torch.Tensor]:
        start.wait(timeout=60)
        return train(index, name)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(run, range(16), timeout=60))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_a_backward_in_another_thread_updates_the_state_of_its_forward():
    module, x = te.Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        y = module(x)
    thread = threading.Thread(target=y.backward, args=(torch.full((16, 48), 3.0),))
    thread.start()
    thread.join(timeout=60)
    assert module.fp8_meta["scaling_bwd"].amax_history[-1, 0] == 3.0


def test_a_printed_module_shows_its_sizes():
    text = repr(torch.nn.Sequential(te.Linear(32, 48, bias=False), te.LayerNorm(48, zero_centered_gamma=True)))
    assert "Linear(in_features=32, out_features=48, bias=False)" in text
    assert "LayerNorm((48,), eps=1e-05, zero_centered_gamma=True)" in text
