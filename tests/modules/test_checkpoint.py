"""te.checkpoint: its arguments, and random streams of functions that are computed twice."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from recomputed_stack import WAYS, same

import te_hal.modules as te
from te_hal import recipe

EVERY_WAY = pytest.mark.parametrize("way", WAYS)
H, HEADS = 32, 4


class Foreign:
    """A tracker of other make: one stream, which a fork goes on with."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(9).get_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: state.clone() for name, state in self.states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = {name: state.clone() for name, state in states.items()}

    @contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        before = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        yield
        self.states[name] = torch.get_rng_state()
        torch.set_rng_state(before)


def own_tracker() -> te.RNGStatesTracker:
    tracker = te.RNGStatesTracker()
    tracker.add("model-parallel-rng", 9)
    return tracker


TRACKERS = {"none": lambda: None, "own": own_tracker, "foreign": Foreign}


@pytest.mark.parametrize(
    ("kind", "around"), [("none", False), ("own", False), ("own", True), ("foreign", False), ("foreign", True)]
)
@EVERY_WAY
def test_seeded_dropout_of_a_layer_is_the_same_with_recompute(way, kind, around):
    results = []
    for recomputed in (False, True):
        tracker = TRACKERS[kind]()
        torch.manual_seed(1)
        layer = te.TransformerLayer(
            *(H, 2 * H, HEADS),
            hidden_dropout=0.2,
            attention_dropout=0.3,
            get_rng_state_tracker=None if tracker is None else lambda held=tracker: held,
        )
        found = []
        for _ in range(2):
            x = torch.randn(8, 4, H).requires_grad_()
            with te.autocast(recipe=recipe.DelayedScaling()), tracker.fork() if around else nullcontext():
                y = WAYS[way](layer, x) if recomputed else layer(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad, torch.get_rng_state()]
            found += [] if tracker is None else [torch.cat(list(_flat(tracker.get_states())))]
        results.append(found + [p.grad for p in layer.parameters()])
    assert same(*results)


def _flat(states):
    for state in states.values():
        yield from state.values() if isinstance(state, dict) else [state]


@pytest.mark.parametrize("kind", ["own", "foreign"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_that_draws_from_the_tracker_itself_draws_the_same(kind, reentrant):
    results = []
    for recomputed in (False, True):
        tracker = TRACKERS[kind]()

        def noisy(x: torch.Tensor, tracker=tracker) -> torch.Tensor:
            with tracker.fork():
                return torch.nn.functional.dropout(x.sin(), 0.5)

        x = torch.ones(100, requires_grad=True)
        if recomputed:
            y = te.checkpoint(noisy, x, get_rng_state_tracker=lambda held=tracker: held, use_reentrant=reentrant)
        else:
            y = noisy(x)
        with tracker.fork():
            torch.rand(3)  # others go on with the stream before the backward
        y.square().sum().backward()
        results.append([y.detach(), x.grad, torch.cat(list(_flat(tracker.get_states())))])
    assert same(*results)


@pytest.mark.parametrize("reentrant", [True, False])
def test_keyword_arguments_reach_the_function(reentrant):
    x = torch.ones(3, requires_grad=True)
    y = te.checkpoint(lambda x, *, factor: x * factor, x, factor=3.0, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad.tolist() == [3.0] * 3


def test_torchs_own_arguments_reach_torch():
    entered = []

    @contextmanager
    def note(which: str):
        entered.append(which)
        yield

    x = torch.ones(3, requires_grad=True)

    def contexts():
        return note("first"), note("second")

    te.checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert entered == ["first", "second"]
    with pytest.raises(ValueError, match="context_fn"):
        te.checkpoint(torch.sin, x, context_fn=contexts)


#: Arguments, the error and what it says.
WRONG = {
    "no_function": ((None,), {}, TypeError, r"te.checkpoint: function: got None"),
    "flag": ((torch.sin,), {"use_reentrant": 1}, ValueError, "use_reentrant"),
    "distributed": (
        *((torch.sin,), {"distribute_saved_activations": True}, NotImplementedError),
        "distribute_saved_activations: got True.*leave it out: .*tensor parallelism",
    ),
    "group": (
        (torch.sin,),
        {"tp_group": object()},
        NotImplementedError,
        "tp_group.*te_hal splits no weights over processes",
    ),
    "no_tracker": ((torch.sin,), {"get_rng_state_tracker": lambda: 3}, ValueError, "a function that gives 3"),
    "no_tracker_function": ((torch.sin,), {"get_rng_state_tracker": 3}, ValueError, "get_rng_state_tracker: got 3"),
    "keyword_with_gradient": (
        *((torch.add,), {"other": torch.ones(3, requires_grad=True)}, ValueError),
        "te.checkpoint: other: got a keyword argument that needs a gradient.*pass it by position",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_by_name(case):
    given, named, error, said = WRONG[case]
    with pytest.raises(error, match=said):
        te.checkpoint(*given, torch.ones(3, requires_grad=True), **named)


def _sum_of(held):
    return sum(value if isinstance(value, torch.Tensor) else _sum_of(value) for value in _values(held))


def _values(held):
    return list(held.values()) if isinstance(held, dict) else held


HOLDING = {"list": lambda x: [x], "dict": lambda x: {"x": x}, "inside": lambda x: (torch.ones(3), {"x": [x]})}


@pytest.mark.parametrize("holding", HOLDING)
def test_a_gradient_that_only_a_container_asks_for_comes_or_is_refused(holding):
    x = torch.randn(3, requires_grad=True)
    for arguments, named in (((HOLDING[holding](x),), {}), ((), {"held": HOLDING[holding](x)})):
        with pytest.raises(ValueError, match=r"with a tensor that needs a gradient.*use_reentrant=False"):
            te.checkpoint(_sum_of, *arguments, **named)
        x.grad = None
        te.checkpoint(_sum_of, *arguments, use_reentrant=False, **named).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))
        with torch.no_grad(), pytest.warns(UserWarning, match="None of the inputs"):
            te.checkpoint(_sum_of, *arguments, **named)


@pytest.mark.parametrize("holding", HOLDING)
def test_a_parameter_in_a_container_gets_its_gradient_beside_an_argument_that_needs_one(holding):
    x, held = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    te.checkpoint(lambda given, other: given * _sum_of(other), x, HOLDING[holding](held)).sum().backward()
    assert torch.equal(held.grad, x)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_without_gradients_it_is_a_plain_call(use_reentrant, context):
    layer, x = te.Linear(16, 16), torch.randn(8, 16, requires_grad=True)
    with context():
        found, expected = te.checkpoint(layer, x, use_reentrant=use_reentrant), layer(x)
    assert torch.equal(found, expected)
    assert not found.requires_grad


#: Functions of an input and a layer, some result of which is a parameter.
PARAMETER_AMONG_RESULTS = {
    "a layer": lambda layer: layer,
    "the parameter alone": lambda layer: lambda x: layer.bias,  # noqa: ARG005 - of the function's signature
    "behind two others": lambda layer: lambda x: (x * 2, x, layer.weight),
}


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no_grad"])
@pytest.mark.parametrize("case", PARAMETER_AMONG_RESULTS)
def test_a_result_that_is_a_parameter_is_refused_with_reentrance(case, grad):
    layer = te.Linear(8, 8, return_bias=True)
    x = torch.ones(4, 8, requires_grad=True)
    with (
        pytest.raises(NotImplementedError, match=r"is a parameter.*pass use_reentrant=False"),
        torch.set_grad_enabled(grad),
    ):
        te.checkpoint(PARAMETER_AMONG_RESULTS[case](layer), x)
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in layer.parameters())


def test_a_layer_that_returns_its_bias_is_recomputed_without_reentrance():
    layer = te.Linear(8, 8, return_bias=True)
    x = torch.arange(32.0).view(4, 8).requires_grad_()
    y, bias = te.checkpoint(layer, x, use_reentrant=False)
    assert bias is layer.bias
    (y + bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((8,), 4.0))
    assert torch.equal(layer.weight.grad, x.detach().sum(0).expand(8, 8))
    assert torch.allclose(x.grad, layer.weight.detach().sum(0).expand(4, 8))


@pytest.mark.parametrize(
    "view", [lambda p: p.view(2, 4), lambda p: p[:], lambda p: p * 1], ids=["view", "slice", "new"]
)
def test_an_argument_and_what_is_made_of_a_parameter_may_be_results(view):
    layer = te.Linear(8, 8)
    x = torch.ones(4, 8, requires_grad=True)
    y, same_x, made = te.checkpoint(lambda a: (a * 2, a, view(layer.bias)), x)
    (y.sum() + same_x.sum() + made.sum()).backward()
    assert torch.equal(x.grad, torch.full((4, 8), 3.0))
    assert torch.equal(layer.bias.grad, torch.ones(8))


#: Functions whose results autograd's function around them could not take, by what they are given besides their input.
OUTSIDE = {
    "alone": lambda made: lambda x: made,  # noqa: ARG005 - of the function's signature
    "behind another": lambda made: lambda x: (x.sin(), made),
    "a view made outside": lambda made: lambda x, view=made[:2]: (x.sin(), view),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_result_computed_outside_is_refused_with_reentrance_and_keeps_its_history(case):
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    made = w * 2
    with pytest.raises(NotImplementedError, match=r"computed outside of it \(shape \[.\]\).*pass use_reentrant=False"):
        te.checkpoint(OUTSIDE[case](made), x)
    results = te.checkpoint(OUTSIDE[case](made), x, use_reentrant=False)
    torch.cat(results if isinstance(results, tuple) else (results,)).sum().backward()
    assert w.grad[:2].tolist() == [2.0, 2.0]


INSIDE = {
    "a view taken inside": lambda made: lambda x: (x.sin(), made[:2]),
    "in gradients switched on inside": lambda made: torch.enable_grad()(lambda x: (x.sin(), made.detach() * x)),
    "the argument": lambda made: lambda x: (x, made.detach() * x),
}


@pytest.mark.parametrize("case", INSIDE)
def test_what_the_function_makes_itself_may_be_a_result_with_reentrance(case):
    grads = []
    for recomputed in (False, True):
        w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        function = INSIDE[case](w * 2)
        torch.cat(te.checkpoint(function, x) if recomputed else function(x)).sum().backward()
        grads += [[x.grad, torch.zeros(3) if w.grad is None else w.grad]]
    assert same(*grads)


@pytest.mark.parametrize("pack", [lambda y: [y, y], lambda y: {"y": y}, lambda y: (y, [y])], ids=["list", "dict", "in"])
def test_tensors_inside_of_a_list_or_dict_are_refused_with_reentrance_instead_of_left_without_a_gradient(pack):
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"a (list|dict) of tensors, which would get no gradient"):
        te.checkpoint(lambda x: pack(x.sin()), x)
    with torch.no_grad():
        te.checkpoint(lambda x: pack(x.sin()), x)
