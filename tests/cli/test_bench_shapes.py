"""The sizes are those of the models they are named after, and a device's own events tell the time where it has them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from te_hal.cli.bench_clock import Clock
from te_hal.cli.bench_shapes import MODELS, size_for

#: Decoder layers, and the parameters of all their linear layers, from the models' published configurations.
PUBLISHED = {"1B": (16, 973_078_528), "7B": (32, 6_476_005_376), "70B": (80, 68_451_041_280)}


@pytest.mark.parametrize("name", MODELS)
def test_the_linear_layers_have_as_many_parameters_as_the_models(name) -> None:
    layers, parameters = PUBLISHED[name]
    assert layers * sum(out * into for out, into in MODELS[name].linears.values()) == parameters


@pytest.mark.parametrize(
    ("device", "quick", "models", "tokens"),
    [("cpu", True, ("1B",), 64), ("cpu", False, ("1B",), 256), ("cuda", True, ("1B",), 4096)],
)
def test_a_cpu_gets_less_to_do(device, quick, models, tokens) -> None:
    size = size_for(torch.device(device), (), None, quick=quick)
    assert (size.models, size.tokens) == (models, tokens)
    assert size_for(torch.device(device), ("70B",), 8, quick=quick).models == ("70B",)


def test_every_model_is_the_default_of_a_device() -> None:
    assert size_for(torch.device("cuda"), (), None, quick=False).models == tuple(MODELS)


class FakeDevice:
    """A queue whose work takes 5 ms a call, which events see and the host does not."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0
        self.current: list[torch.device] = []

    def synchronize(self, _device) -> None:
        self.waits += 1

    def work(self) -> None:
        self.now += 5.0

    def module(self, _device) -> SimpleNamespace:
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                assert device.current == [torch.device("cuda:1")]
                self.at = device.now

            def elapsed_time(self, end) -> float:
                return end.at - self.at

        return SimpleNamespace(Event=Event, synchronize=self.synchronize, device=self.made_current)

    @contextlib.contextmanager
    def made_current(self, device):
        self.current.append(device)
        yield
        self.current.pop()


def test_a_device_with_events_tells_the_time_by_them_and_is_waited_for_once(monkeypatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", device.module)
    clock = Clock(torch.device("cuda:1"), 0.01)
    timing = clock.measure(device.work)
    assert clock.kind == "events"
    assert (timing.median_us, timing.least_us) == (5000.0, 5000.0)
    assert timing.runs > 10
    assert device.waits == 3


def test_a_device_without_events_is_waited_for_after_every_call(monkeypatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(synchronize=device.synchronize))
    clock = Clock(torch.device("xla"), 0.001)
    timing = clock.measure(device.work)
    assert clock.kind == "clock"
    assert device.waits == timing.runs + 2


def test_the_time_allowed_decides_how_often_a_call_is_timed() -> None:
    calls = []
    timing = Clock(torch.device("cpu"), 0.0).measure(lambda: calls.append(1))
    assert (timing.runs, len(calls)) == (3, 5)
    assert Clock(torch.device("cpu"), 10.0).measure(lambda: None).runs == 200
