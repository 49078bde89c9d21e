"""Which backend runs an op: forced, scoped, or claimed by the device."""

import threading

import pytest
import torch
from stub_backends import stub

import te_hal
from te_hal import ops
from te_hal.dispatch import backend_for, forced_backend, list_backends, register_backend
from te_hal.schema.errors import (
    ArgumentTypeError,
    BackendNotFoundError,
    BackendUnavailableError,
    StateError,
    TeHalError,
)
from te_hal.schema.support import SUPPORTED, Code, Support

INPUT = torch.ones(3)
NO_CHIP = Support.no(Code.ENVIRONMENT, "no chip is visible")


@pytest.fixture
def calls() -> list[str]:
    """Backends a, b and meta_only; each records its name when its amax runs."""
    seen: list[str] = []
    for name in ("a", "b"):
        register_backend(stub(name, act=lambda _, name=name: seen.append(name)))
    register_backend(stub("meta_only", serves={"meta"}, default_for={"meta"}))
    register_backend(stub("no_chip", usable=lambda: NO_CHIP))
    return seen


@pytest.mark.usefixtures("calls")
def test_cpu_tensors_go_to_the_backend_that_claims_the_cpu() -> None:
    assert backend_for(torch.device("cpu")).name == "cpu_reference"
    assert te_hal.get_backend().name == "cpu_reference"
    assert forced_backend() is None


@pytest.mark.usefixtures("calls")
def test_without_tensors_the_default_device_decides() -> None:
    with torch.device("meta"):
        assert te_hal.get_backend().name == "meta_only"
    torch.set_default_device("meta")
    try:
        assert te_hal.get_backend().name == "meta_only"
    finally:
        torch.set_default_device(None)
    assert te_hal.get_backend().name == "cpu_reference"


def test_a_forced_backend_runs_until_the_forcing_is_removed(calls: list[str]) -> None:
    te_hal.set_backend("a")
    ops.amax(INPUT)
    te_hal.set_backend("b")
    ops.amax(INPUT)
    te_hal.set_backend(None)
    ops.amax(INPUT)
    assert calls == ["a", "b"]


def test_scopes_nest_and_the_innermost_counts(calls: list[str]) -> None:
    te_hal.set_backend("a")
    with te_hal.use_backend("b"):
        ops.amax(INPUT)
        with te_hal.use_backend("a"):
            ops.amax(INPUT)
            with te_hal.use_backend(None):
                ops.amax(INPUT)
        ops.amax(INPUT)
    ops.amax(INPUT)
    assert calls == ["b", "a", "b", "a"]


def test_a_scope_ends_with_an_exception(calls: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"inside"), te_hal.use_backend("a"):
        raise RuntimeError("inside")
    ops.amax(INPUT)
    assert calls == []


def test_one_scope_object_can_be_entered_again_and_decorate(calls: list[str]) -> None:
    scope = te_hal.use_backend("a")
    with scope, scope:
        ops.amax(INPUT)

    @te_hal.use_backend("b")  # type: ignore[operator]
    def step() -> None:
        ops.amax(INPUT)

    step()
    step()
    assert calls == ["a", "b", "b"]


@pytest.mark.usefixtures("calls")
def test_a_scope_concerns_its_own_thread_only() -> None:
    scope = te_hal.use_backend("a")
    both_inside = threading.Barrier(2)
    found: dict[str, str] = {}

    def work(name: str, inside: bool) -> None:
        if inside:
            with scope:
                both_inside.wait(10)
                found[name] = te_hal.get_backend().name
        else:
            both_inside.wait(10)
            found[name] = te_hal.get_backend().name

    threads = [threading.Thread(target=work, args=(str(inside), inside)) for inside in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"True": "a", "False": "cpu_reference"}


PROCESS_WIDE = {
    "set_backend": lambda: te_hal.set_backend("b"),
    "set_backend_none": lambda: te_hal.set_backend(None),
    "set_policy": lambda: te_hal.set_policy(te_hal.Policy()),
    "reset": te_hal.reset,
}


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("case", PROCESS_WIDE)
@pytest.mark.parametrize("scope", [lambda: te_hal.use_backend("a"), lambda: te_hal.use_policy(te_hal.Policy())])
def test_a_process_wide_change_inside_a_scope_is_refused(case: str, scope: object) -> None:
    with scope(), pytest.raises(StateError, match=r"inside a use_backend or use_policy block"):  # type: ignore[operator]
        PROCESS_WIDE[case]()


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("choose", [te_hal.set_backend, lambda name: te_hal.use_backend(name).__enter__()])
def test_a_wrong_choice_lists_what_exists_and_why_each_is_unusable(choose: object) -> None:
    with pytest.raises(BackendNotFoundError) as unknown:
        choose("muse")  # type: ignore[operator]
    with pytest.raises(BackendUnavailableError) as unusable:
        choose("no_chip")  # type: ignore[operator]
    for error in (unknown, unusable):
        text = str(error.value)
        assert "a (usable); b (usable); cpu_reference (usable)" in text
        assert "no_chip (unusable: no chip is visible)" in text
    assert "'muse'" in str(unknown.value)
    assert "backend 'no_chip', which cannot be used here: no chip is visible" in str(unusable.value)
    assert te_hal.get_backend().name == "cpu_reference"


@pytest.mark.parametrize("value", [3, True, torch.device("cpu"), stub("whole")], ids=repr)
def test_a_backend_is_chosen_by_its_name_only(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"accepted: a backend's name, or None"):
        te_hal.set_backend(value)  # type: ignore[arg-type]


@pytest.mark.usefixtures("calls")
def test_two_claimants_of_a_device_are_an_error_that_names_both_and_the_way_out() -> None:
    register_backend(stub("rival", default_for={"meta"}))
    with torch.device("meta"):
        with pytest.raises(BackendUnavailableError) as error:
            te_hal.get_backend()
        assert not any(info.default for info in list_backends())
        te_hal.set_backend("rival")
        assert te_hal.get_backend().name == "rival"
    assert "2 backends that claim it unasked (meta_only, rival)" in str(error.value)
    assert "te_hal.set_backend(name)" in str(error.value)


@pytest.mark.usefixtures("calls")
def test_an_unusable_claimant_is_no_rival() -> None:
    register_backend(stub("rival", default_for={"meta"}, usable=lambda: NO_CHIP))
    assert backend_for(torch.device("meta")).name == "meta_only"


def test_a_device_that_nobody_claims_is_an_error_that_lists_all() -> None:
    with pytest.raises(BackendUnavailableError, match=r"backend for meta: got none that claims it; .*null \(usable"):
        ops.amax(torch.ones(2, device="meta"))


@pytest.mark.usefixtures("calls")
def test_a_forced_backend_refuses_other_devices_naming_both() -> None:
    te_hal.set_backend("meta_only")
    with pytest.raises(BackendUnavailableError, match=r"tensors on cpu for backend 'meta_only'; accepted: .* meta;"):
        ops.amax(INPUT)
    assert ops.amax(torch.ones(2, device="meta")).item() == 1.0


def test_a_backend_that_became_usable_can_be_set() -> None:
    answers = [NO_CHIP, SUPPORTED]
    register_backend(stub("slow_start", usable=lambda: answers.pop(0)))
    with pytest.raises(BackendUnavailableError):
        te_hal.set_backend("slow_start")
    te_hal.set_backend("slow_start")
    assert te_hal.get_backend().name == "slow_start"


def test_a_scope_in_a_loop_asks_a_backend_once_whether_it_is_usable() -> None:
    asked = []
    register_backend(stub("slow", usable=lambda: asked.append(1) or SUPPORTED))  # type: ignore[func-returns-value]
    for _ in range(5):
        with te_hal.use_backend("slow"):
            ops.amax(INPUT)
    assert asked == [1]


def raise_os_error() -> Support:
    raise OSError("driver too old")


PROBES = {
    "raises": (raise_os_error, "its usable() failed: OSError: driver too old"),
    "answers_true": (lambda: True, "its usable() failed: answered True, which is no Support"),
    "says_no": (lambda: NO_CHIP, "no chip is visible"),
}


@pytest.mark.parametrize("case", PROBES)
def test_listing_never_raises_and_keeps_the_reason(case: str) -> None:
    usable, reason = PROBES[case]
    register_backend(stub("odd", usable=usable))
    info = next(info for info in list_backends() if info.name == "odd")
    assert (info.usable, info.reason) == (False, reason)


@pytest.mark.usefixtures("calls")
def test_the_list_is_sorted_and_marks_what_is_forced_and_what_is_default() -> None:
    te_hal.set_backend("b")
    rows = {info.name: info for info in list_backends()}
    assert list(rows) == sorted(rows)
    assert [name for name, info in rows.items() if info.forced] == ["b"]
    assert [name for name, info in rows.items() if info.default] == ["cpu_reference"]
    assert rows["meta_only"].serves == rows["meta_only"].default_for == ("meta",)
    assert rows["null"].description
    with pytest.raises(AttributeError):
        rows["b"].usable = False  # type: ignore[misc]


@pytest.mark.usefixtures("calls")
def test_every_selection_error_is_a_te_hal_error_with_four_facts() -> None:
    for attempt in (
        lambda: te_hal.set_backend("muse"),
        lambda: te_hal.set_backend("no_chip"),
        lambda: te_hal.set_backend(1),  # type: ignore[arg-type]
        lambda: backend_for(torch.device("cuda")),
    ):
        with pytest.raises(TeHalError) as error:
            attempt()
        for fact in (error.value.where, error.value.got, error.value.accepted, error.value.todo):
            assert fact
            assert fact in str(error.value)


@pytest.mark.usefixtures("calls")
def test_a_forced_backend_is_told_also_where_it_does_not_serve_the_default_device() -> None:
    te_hal.set_backend("meta_only")
    assert te_hal.get_backend().name == "meta_only"
    with te_hal.use_backend("a"):
        assert te_hal.get_backend().name == "a"
