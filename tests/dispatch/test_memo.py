"""The memo: asked once per kind of call, renewed whenever another choice may result, safe under threads."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from stub_backends import stub

import te_hal
from te_hal import Policy, ops
from te_hal.dispatch import current_memo, register_backend, registry, selection
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import BackendUnavailableError
from te_hal.schema.support import SUPPORTED, Call, Code, Support

INPUT = torch.ones(3)


@pytest.fixture
def asked() -> list[Call]:
    """The questions that backend `curious` was asked."""
    questions: list[Call] = []

    def supports(call: Call) -> Support:
        questions.append(call)
        return SUPPORTED

    register_backend(stub("curious", supports=supports))
    return questions


def test_a_kind_of_call_is_asked_about_once(asked: list[Call]) -> None:
    te_hal.set_backend("curious")
    for size in (1, 5, 7):
        ops.amax(torch.ones(size))
    assert [str(call) for call in asked] == ["amax(input=torch.float32) on cpu"]


DIFFERENT = {
    "dtype": lambda: ops.amax(INPUT.bfloat16()),
    "device": lambda: ops.amax(INPUT.to("meta")),
    "operand_given": lambda: ops.amax(INPUT, out=torch.zeros(1)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_another_kind_of_call_is_another_question(case: str, asked: list[Call]) -> None:
    te_hal.set_backend("curious")
    ops.amax(INPUT)
    DIFFERENT[case]()
    DIFFERENT[case]()
    assert len(asked) == 2


def test_a_scope_that_comes_back_finds_its_memo(asked: list[Call]) -> None:
    for _ in range(4):
        with te_hal.use_backend("curious"):
            ops.amax(INPUT)
    assert len(asked) == 1


def test_policies_without_end_are_forgotten_and_the_one_in_force_is_still_renewed(asked: list[Call]) -> None:
    te_hal.set_backend("curious")
    ops.amax(INPUT)
    forgotten = []
    for index in range(300):
        policy = Policy(per_op={f"{op}": "null" for bit, op in enumerate(SCHEMAS) if index >> bit & 1})
        with te_hal.use_policy(policy):
            forgotten.append(weakref.ref(selection.current()))
    gc.collect()
    assert sum(ref() is not None for ref in forgotten) < 100
    before = current_memo()
    register_another()
    assert current_memo() is not before
    ops.amax(INPUT)
    assert len(asked) == 2


def register_another() -> None:
    register_backend(stub(f"another_{len(registry.tables().backends)}"))


CHANGES: dict[str, Callable[[], object]] = {
    "set_backend": lambda: te_hal.set_backend("null"),
    "no_forcing": lambda: te_hal.set_backend(None),
    "set_policy": lambda: te_hal.set_policy(Policy(fallback=("null",))),
    "registration": register_another,
    "reset": te_hal.reset,
}


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("case", CHANGES)
def test_the_memo_is_another_object_after_a_change(case: str) -> None:
    te_hal.set_backend("curious")
    ops.amax(INPUT)
    before = current_memo()
    assert before
    CHANGES[case]()
    assert current_memo() is not before
    assert not current_memo()


@pytest.mark.usefixtures("asked")
def test_the_memo_in_a_scope_is_its_own_and_the_outer_one_comes_back() -> None:
    outer = current_memo()
    with te_hal.use_backend("curious"):
        assert current_memo() is not outer
    assert current_memo() is outer


@pytest.mark.usefixtures("asked")
def test_a_registration_renews_the_memo_of_a_scope_that_is_open() -> None:
    with te_hal.use_backend("curious"):
        ops.amax(INPUT)
        before = current_memo()
        register_another()
        assert current_memo() is not before


def test_a_call_resolved_while_the_choice_changes_is_not_remembered() -> None:
    ran = []

    def supports(_: Call) -> Support:
        if "late" not in registry.tables().backends:
            register_backend(stub("late"))
        return SUPPORTED

    register_backend(stub("slow", supports=supports, act=lambda _: ran.append("slow")))
    te_hal.set_backend("slow")
    ops.amax(INPUT)
    assert ran == ["slow"]
    assert not current_memo()
    ops.amax(INPUT)
    assert current_memo()


def test_the_memo_is_renewed_when_a_backend_stops_being_usable() -> None:
    answers = [SUPPORTED, Support.no(Code.ENVIRONMENT, "unplugged")]
    register_backend(stub("chip", usable=lambda: answers[0]))
    te_hal.set_backend("chip")
    ops.amax(INPUT)
    before = current_memo()
    te_hal.list_backends()
    assert current_memo() is before
    answers.reverse()
    te_hal.list_backends()
    assert current_memo() is not before
    with pytest.raises(BackendUnavailableError, match=r"unplugged"):
        ops.amax(INPUT)


def test_a_wrong_call_is_not_remembered() -> None:
    te_hal.set_backend("null")
    with pytest.raises(ValueError, match=r"dtype torch.int64"):
        ops.amax(torch.ones(3, dtype=torch.int64))
    assert not current_memo()


def test_many_threads_may_make_the_first_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    create = registry.discovery._load

    def counting_load(*arguments: object) -> object:
        loads.append(threading.get_ident())
        return create(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(registry.discovery, "_load", counting_load)
    before = registry.REGISTRY.tables
    registry.REGISTRY.tables = None
    start = threading.Barrier(16)
    results: list[float] = []

    def work() -> None:
        start.wait(10)
        results.append(ops.amax(torch.tensor([3.0, -5.0])).item())

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = registry.REGISTRY.tables
    registry.REGISTRY.publish(before)  # type: ignore[arg-type]
    assert results == [5.0] * 16
    assert len(set(loads)) == 1
    assert after is not None
    assert len(loads) == len(after.backends)


def test_threads_that_change_the_choice_never_see_a_kernel_of_another_backend() -> None:
    wrong: list[str] = []
    for name in ("a", "b"):
        register_backend(stub(name, act=lambda _, name=name: seen.ran.append(name)))
    seen = threading.local()

    def work(name: str) -> None:
        for _ in range(300):
            seen.ran = []
            with te_hal.use_backend(name):
                ops.amax(INPUT)
            wrong.extend(other for other in seen.ran if other != name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b") * 4]
    for thread in threads:
        thread.start()
    for index in range(20):
        te_hal.set_backend("null" if index % 2 else None)
        register_another()
    for thread in threads:
        thread.join()
    assert wrong == []
