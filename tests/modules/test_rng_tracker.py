"""The RNG tracker: named streams that neither disturb nor are disturbed."""

from __future__ import annotations

import io

import pytest
import torch

import te_hal.modules as te
from te_hal.schema.errors import StateError, TeHalError


@pytest.fixture
def tracker() -> te.RNGStatesTracker:
    made = te.RNGStatesTracker()
    made.add("model-parallel-rng", 1234)
    made.add("other", 5678)
    return made


def stream(seed: int, count: int) -> torch.Tensor:
    """What a generator of its own draws from a seed."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def test_forks_of_a_name_draw_one_stream_from_its_seed(tracker):
    expected = stream(1234, 20)
    found = []
    for _ in range(2):
        with tracker.fork():
            found.append(torch.rand(10))
    assert torch.equal(torch.cat(found), expected)


def test_what_is_drawn_outside_is_as_if_there_were_no_fork(tracker):
    torch.manual_seed(7)
    before = torch.rand(3)
    with tracker.fork("other"):
        torch.rand(100)
    assert torch.equal(torch.cat([before, torch.rand(3)]), stream(7, 6))


def test_an_exception_inside_a_fork_restores_what_was_outside(tracker):
    def draw_and_fail() -> None:
        with tracker.fork():
            torch.rand(5)
            raise ZeroDivisionError

    torch.manual_seed(7)
    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert torch.equal(torch.rand(3), stream(7, 3))
    with tracker.fork():
        assert torch.equal(torch.rand(5), stream(1234, 10)[5:])


@pytest.mark.parametrize("order", [["a"], ["a", "a"], ["a", "b", "a"], ["a", "b", "b"]], ids="".join)
def test_nested_forks_never_draw_the_same_numbers_twice(order):
    tracker = te.RNGStatesTracker()
    for name, seed in (("a", 1), ("b", 2)):
        tracker.add(name, seed)
    drawn = {"a": [], "b": []}

    def enter(rest: list[str]) -> None:
        if rest:
            with tracker.fork(rest[0]):
                drawn[rest[0]].append(torch.rand(4))
                enter(rest[1:])
                drawn[rest[0]].append(torch.rand(4))

    enter(order)
    for name, seed in (("a", 1), ("b", 2)):
        if drawn[name]:
            found = torch.cat(drawn[name])
            assert torch.equal(found, stream(seed, found.numel()))


def test_states_go_through_a_file_and_the_stream_goes_on(tracker):
    with tracker.fork():
        torch.rand(10)
    stored = io.BytesIO()
    torch.save(tracker.get_states(), stored)
    stored.seek(0)
    other = te.RNGStatesTracker()
    other.set_states(torch.load(stored, weights_only=True))
    with other.fork():
        assert torch.equal(torch.rand(10), stream(1234, 20)[10:])


def test_states_are_handed_out_and_taken_over_as_copies(tracker):
    states = tracker.get_states()
    tracker.set_states(states)
    states["other"]["cpu"].zero_()
    with tracker.fork("other"):
        assert torch.equal(torch.rand(4), stream(5678, 4))


@pytest.mark.parametrize(("name", "seed"), [("other", 1), ("new", 1234)], ids=["name", "seed"])
def test_a_name_or_seed_that_is_taken_is_refused(tracker, name, seed):
    with pytest.raises(StateError, match=r"RNGStatesTracker: add: got .* which is taken"):
        tracker.add(name, seed)
    tracker.reset()
    tracker.add(name, seed)


def test_a_name_without_a_state_is_a_key_error_that_lists_the_names(tracker):
    with (
        pytest.raises(KeyError, match=r"fork: got 'nobody'; accepted: 'model-parallel-rng', 'other'") as caught,
        tracker.fork("nobody"),
    ):
        pass
    assert isinstance(caught.value, TeHalError)
    assert te.CudaRNGStatesTracker is te.RNGStatesTracker


@pytest.mark.parametrize("states", [None, {"a": torch.zeros(3, dtype=torch.uint8)}, {"a": {"cpu": [1]}}], ids=type)
def test_states_of_another_form_are_refused(tracker, states):
    with pytest.raises(ValueError, match=r"set_states: got .* pass what get_states returned"):
        tracker.set_states(states)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch sees no accelerator")
def test_the_accelerators_generator_forks_too(tracker):
    device = torch.accelerator.current_accelerator()
    expected = torch.rand(20, device=device, generator=torch.Generator(device).manual_seed(1234))
    with tracker.fork():
        first = torch.rand(20, device=device)
    assert torch.equal(first, expected)


@pytest.mark.parametrize("given", [None, "rng", object], ids=["None", "text", "class without fork"])
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormLinear, te.LayerNormMLP], ids=lambda kind: kind.__name__)
def test_a_function_that_gives_no_tracker_is_refused(make, given):
    with pytest.raises(ValueError, match=r"get_rng_state_tracker: got a function that gives .*accepted") as caught:
        make(32, 32, get_rng_state_tracker=lambda: given)
    assert isinstance(caught.value, TeHalError)


def test_attentions_dropout_refuses_a_function_that_gives_no_tracker():
    attention = te.DotProductAttention(2, 8, attention_dropout=0.5, get_rng_state_tracker=lambda: None)
    with pytest.raises(ValueError, match="get_rng_state_tracker: got a function that gives None"):
        attention(*(torch.randn(4, 2, 2, 8) for _ in range(3)))
