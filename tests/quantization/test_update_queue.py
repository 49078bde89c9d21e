"""The queue of states that wait for their update, by itself."""

from __future__ import annotations

import threading

import pytest

from te_hal.quantization.updates import UpdateQueue


class Counting:
    """A state that notes when it is updated."""

    def __init__(self, log: list[str], name: str, error: Exception | None = None) -> None:
        self.log, self.name, self.error = log, name, error

    def update(self) -> None:
        self.log.append(self.name)
        if self.error is not None:
            raise self.error

    def rolling(self) -> None:
        """By itself only."""


def test_states_are_updated_once_in_the_order_they_came():
    log: list[str] = []
    queue, states = UpdateQueue(), [Counting(log, name) for name in "cab"]
    for state in (*states, states[0]):
        queue.add(state, forward=True)
    queue.add(states[1], forward=False)
    queue.update(forward=True)
    queue.update(forward=True)
    assert log == ["c", "a", "b"]
    queue.update(forward=False)
    assert log == ["c", "a", "b", "a"]


def test_a_state_that_is_gone_is_forgotten():
    log: list[str] = []
    queue = UpdateQueue()
    queue.add(Counting(log, "gone"), forward=True)
    queue.update(forward=True)
    assert log == []


def test_a_state_that_is_gone_leaves_nothing_in_the_queue():
    queue = UpdateQueue()
    for _ in range(50):
        queue.add(Counting([], "gone"), forward=True)
        queue.add(Counting([], "gone"), forward=False)
    assert not queue._forward.states
    assert not queue._backward.states


def test_what_is_forgotten_is_not_updated():
    log: list[str] = []
    queue, state = UpdateQueue(), Counting(log, "a")
    queue.add(state, forward=True)
    queue.add(state, forward=False)
    queue.clear()
    queue.update(forward=True)
    queue.update(forward=False)
    assert log == []


def test_an_error_leaves_the_states_behind_it_waiting_and_repeats_none():
    log: list[str] = []
    queue = UpdateQueue()
    states = [Counting(log, "a"), Counting(log, "b", KeyError("b")), Counting(log, "c")]
    for state in states:
        queue.add(state, forward=True)
    with pytest.raises(KeyError):
        queue.update(forward=True)
    queue.update(forward=True)
    assert log == ["a", "b", "c"]


def test_a_state_may_join_while_others_are_updated():
    log: list[str] = []
    queue = UpdateQueue()

    class Joining(Counting):
        def update(self) -> None:
            super().update()
            queue.add(late, forward=True)

    late, first = Counting(log, "late"), Joining(log, "first")
    queue.add(first, forward=True)
    queue.update(forward=True)
    assert log == ["first", "late"]


def test_many_threads_lose_no_update():
    log: list[str] = []
    queue = UpdateQueue()
    states = [Counting(log, str(i)) for i in range(400)]

    def work(part: list[Counting]) -> None:
        for state in part:
            queue.add(state, forward=False)
            queue.update(forward=False)

    threads = [threading.Thread(target=work, args=(states[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(log) == sorted(state.name for state in states)
