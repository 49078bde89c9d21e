"""Discovery: ordered, each load by itself, failures kept with their reasons, interrupts leave nothing behind."""

import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch
from stub_backends import stub

import te_hal
from te_hal.dispatch import Backend, GemmCopies, discovery, list_backends, register_backend, registry
from te_hal.schema.errors import BackendNotFoundError, BackendUnavailableError, StateError
from te_hal.schema.support import SUPPORTED, Support

MODULE = "entry_points_of_these_tests"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Call with name=function: these are then the only entry points, and nothing has been discovered yet."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    before = registry.REGISTRY.tables

    def set_points(*points: EntryPoint, **functions: Callable[[], object]) -> None:
        for name, function in functions.items():
            setattr(module, name, function)
        made = [EntryPoint(name, f"{MODULE}:{name}", discovery.GROUP) for name in reversed(functions)]
        monkeypatch.setattr(discovery.metadata, "entry_points", lambda *, group: [*points, *made])  # noqa: ARG005
        registry.REGISTRY.tables = None

    yield set_points
    monkeypatch.undo()
    registry.REGISTRY.publish(before)


def fail_with(error: BaseException) -> Callable[[], Backend]:
    def create() -> Backend:
        raise error

    return create


def reason_of(name: str) -> str:
    return next(info.reason for info in list_backends() if info.name == name)


def test_backends_are_loaded_in_order_of_name(install: Callable[..., None]) -> None:
    loaded = []

    def creator(name: str) -> Callable[[], Backend]:
        return lambda: loaded.append(name) or stub(name)  # type: ignore[func-returns-value]

    install(b=creator("b"), c=creator("c"), a=creator("a"))
    assert [info.name for info in list_backends()] == ["a", "b", "c"]
    assert loaded == ["a", "b", "c"]


def test_a_backend_that_fails_to_load_is_listed_with_its_reason_and_the_rest_works(
    install: Callable[..., None],
) -> None:
    install(broken=fail_with(OSError("libchip.so.1 is missing")), good=lambda: stub("good", default_for={"cpu"}))
    te_hal.set_backend("good")
    assert te_hal.get_backend().name == "good"
    info = next(info for info in list_backends() if info.name == "broken")
    assert not info.usable
    assert "OSError: libchip.so.1 is missing" in info.reason
    assert f"{MODULE}:broken" in info.reason


def test_a_backend_that_exits_is_a_failure_like_any_other(install: Callable[..., None]) -> None:
    def exits() -> Backend:
        sys.exit("no device found")

    def exits_when_asked() -> Support:
        sys.exit(3)

    install(leaves=exits, good=lambda: stub("good"), late=lambda: stub("late", usable=exits_when_asked))
    assert [info.name for info in list_backends() if info.usable] == ["good"]
    assert "SystemExit: no device found" in reason_of("leaves")
    assert reason_of("late") == "its usable() failed: SystemExit: 3"


def test_a_failure_to_load_is_shown_by_later_errors(install: Callable[..., None]) -> None:
    install(broken=fail_with(OSError("libchip.so.1 is missing")), good=lambda: stub("good"))
    for name, error in (("broken", BackendUnavailableError), ("typo", BackendNotFoundError)):
        with pytest.raises(error, match=r"OSError: libchip.so.1 is missing"):
            te_hal.set_backend(name)
    with pytest.raises(BackendUnavailableError, match=r"none that claims it; .*libchip.so.1 is missing"):
        te_hal.get_backend()


def test_the_cause_of_a_wrapped_failure_is_kept(install: Callable[..., None]) -> None:
    error = ImportError("cannot import the chip")
    error.__cause__ = OSError("undefined symbol: chip_init")
    install(broken=fail_with(error))
    assert "ImportError: cannot import the chip (from OSError: undefined symbol" in reason_of("broken")


WRONG = {
    "another_name": (lambda: stub("other"), "a backend named 'other'; accepted: the name of the entry point"),
    "no_backend": (lambda: "musa", "got a str"),
    "drifted": (
        lambda: stub("wrong", kernels={"amax": lambda scores: scores}),
        "RegistrationError: backend wrong: amax: got a parameter 'scores' that the op does not have",
    ),
    "needs_an_argument": (lambda device: stub(f"{device}"), "TypeError"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_an_entry_point_brings_is_checked(case: str, install: Callable[..., None]) -> None:
    create, reason = WRONG[case]
    install(wrong=create, right=lambda: stub("right"))
    assert reason in reason_of("wrong")
    assert [info.name for info in list_backends() if info.usable] == ["right"]


def test_a_module_that_does_not_exist_is_a_reason(install: Callable[..., None]) -> None:
    install(EntryPoint("gone", "no_such_module_here:create_backend", discovery.GROUP))
    assert "ModuleNotFoundError: No module named 'no_such_module_here'" in reason_of("gone")


def test_two_distributions_with_one_name_are_both_refused(install: Callable[..., None]) -> None:
    points = [EntryPoint("chip", f"{package}:create_backend", discovery.GROUP) for package in ("one", "two")]
    install(*points, good=lambda: stub("good"))
    reason = reason_of("chip")
    assert "several distributions claim this name" in reason
    assert "one:create_backend" in reason
    assert "two:create_backend" in reason
    with pytest.raises(BackendUnavailableError, match="several distributions"):
        te_hal.set_backend("chip")


def test_an_entry_point_listed_twice_with_one_target_is_loaded_once(install: Callable[..., None]) -> None:
    twin = EntryPoint("good", f"{MODULE}:good", discovery.GROUP)
    install(twin, good=lambda: stub("good"))
    assert [(info.name, info.usable) for info in list_backends()] == [("good", True)]


def test_without_entry_points_the_missing_command_is_named(install: Callable[..., None]) -> None:
    install()
    assert [(info.name, info.usable) for info in list_backends()] == [("te_hal.backends", False)]
    assert "python setup.py -q egg_info" in list_backends()[0].reason
    for question in (te_hal.get_backend, lambda: te_hal.set_backend("cpu_reference")):
        with pytest.raises((BackendNotFoundError, BackendUnavailableError), match=r"setup.py -q egg_info"):
            question()


def test_metadata_that_cannot_be_read_is_a_reason(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(**_: object) -> None:
        raise UnicodeError("bad byte")

    install()
    monkeypatch.setattr(discovery.metadata, "entry_points", unreadable)
    assert reason_of("te_hal.backends") == "the installed metadata cannot be read: UnicodeError: bad byte"


def test_an_interrupt_during_discovery_leaves_nothing_and_can_be_retried(install: Callable[..., None]) -> None:
    attempts = []

    def interrupted_once() -> Backend:
        attempts.append("b")
        if len(attempts) == 1:
            raise KeyboardInterrupt
        return stub("b")

    install(a=lambda: stub("a"), b=interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        list_backends()
    assert registry.REGISTRY.tables is None
    assert [(info.name, info.usable) for info in list_backends()] == [("a", True), ("b", True)]


SELF_SERVICE = {
    "registers": lambda: register_backend(stub("extra")),
    "selects": lambda: te_hal.set_backend("good"),
    "lists": list_backends,
}


@pytest.mark.parametrize("case", SELF_SERVICE)
def test_a_backend_that_touches_the_registry_while_it_loads_leaves_no_trace(
    case: str, install: Callable[..., None]
) -> None:
    install(good=lambda: stub("good"), pushy=lambda: SELF_SERVICE[case]() or stub("pushy"))
    assert [(info.name, info.usable, info.forced) for info in list_backends()] == [
        ("good", True, False),
        ("pushy", False, False),
    ]
    assert StateError.__name__ in reason_of("pushy")


def test_discovery_runs_once(install: Callable[..., None]) -> None:
    loaded = []
    install(good=lambda: loaded.append(1) or stub("good", default_for={"cpu"}))  # type: ignore[func-returns-value]
    for _ in range(3):
        list_backends()
        te_hal.get_backend()
        with te_hal.use_backend("good"):
            te_hal.ops.amax(torch.ones(1))
        te_hal.reset()
    assert loaded == [1]


def test_a_backend_that_hangs_while_it_loads_or_is_asked_is_named(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "SLOW_SECONDS", 0.01)

    def slow() -> Backend:
        time.sleep(0.2)
        return stub("slow", usable=lambda: time.sleep(0.2) or SUPPORTED)  # type: ignore[func-returns-value]

    install(slow=slow)
    with pytest.warns(RuntimeWarning, match=r"has not come back; .*TE_HAL_DENY=name") as heard:
        assert [(info.name, info.usable) for info in list_backends()] == [("slow", True)]
    said = [str(warning.message).split(" has taken")[0] for warning in heard]
    assert said == ["loading backend 'slow'", "usable() of backend 'slow'"]


NONSENSE = {
    "kernels is no mapping": {"kernels": ["amax"]},
    "a kernel for no op": {"kernels": {"amaxx": abs}},
    "a kernel that is no function": {"kernels": {"amax": 3}},
    "a kernel without a signature": {"kernels": {"amax": min}},
    "serves nothing": {"serves": ()},
    "serves what is no text": {"serves": (1,)},
    "claims what it does not serve": {"serves": ("meta",), "default_for": ("cpu",)},
    "supports is no function": {"supports": True},
    "usable is an answer": {"usable": SUPPORTED},
    "gemm_copies is a dict": {"gemm_copies": {}},
    "gemm_copies that are none": {"gemm_copies": lambda *_: ("rowwise", "rowwise")},
    "gemm_copies of no name": {"gemm_copies": lambda *_: GemmCopies("rowwise", "row")},
    "gemm_copies that raises": {"gemm_copies": lambda *_: 1 // 0},
    "a columnwise order of its own": {"columnwise_order": "zigzag"},
    "an order of no type": {"columnwise_order": [1]},
    "a name of no identifier": {"name": "my chip"},
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_table_of_nonsense_is_refused_naming_the_field_and_the_rest_works(
    case: str, install: Callable[..., None]
) -> None:
    install(wrong=lambda: stub(**{"name": "wrong", **NONSENSE[case]}), right=lambda: stub("right"))
    assert "RegistrationError: " in reason_of("wrong")
    named = "amax" if "a kernel" in case else next(iter(NONSENSE[case]))
    assert named in reason_of("wrong")
    assert [info.name for info in list_backends() if info.usable] == ["right"]
