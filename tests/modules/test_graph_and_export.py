"""Device graphs, ONNX export and questions about the device: refused with what to do, or handed to torch."""

from __future__ import annotations

import pytest
import torch

import te_hal.modules as te
from te_hal import recipe

X = torch.randn(32, 32)


def captures(monkeypatch, function):
    """The CPU as a device with graphs."""
    monkeypatch.setattr(torch.cpu, "make_graphed_callables", function, raising=False)


def test_graphs_are_refused_where_there_are_none_with_what_to_do_instead():
    with pytest.raises(NotImplementedError, match=r"parameters or arguments on cpu.*call the modules as they are"):
        te.make_graphed_callables(te.Linear(32, 32), (X,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sample_kwargs": {"a": 1}}, "sample_kwargs"),
        ({"cache_quantized_params": True}, "cache_quantized_params"),
        ({"retain_graph_in_backward": True}, "retain_graph_in_backward"),
        ({"enabled": True, "recipe": recipe.DelayedScaling()}, "recipe.*DelayedScaling"),
        ({"calibrating": True}, "calibrating"),
    ],
    ids=str,
)
def test_what_a_graph_cannot_hold_is_refused_by_name(monkeypatch, arguments, words):
    captures(monkeypatch, print)
    with pytest.raises(NotImplementedError, match=words):
        te.make_graphed_callables(te.Linear(32, 32), (X,), **arguments)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="a function"):
        te.make_graphed_callables([lambda x: x], (X,))


def test_torch_gets_modules_that_run_in_fp8(monkeypatch):
    """Stands in for the capture, which needs a GPU."""
    seen = {}
    captures(monkeypatch, lambda *args, **kw: seen.update(kw) or args[0])
    module = te.Linear(32, 32)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        wanted = module(X)
    graphed = te.make_graphed_callables(module, (X,), 5, enabled=True, recipe=recipe.Float8CurrentScaling())
    assert graphed is module
    assert torch.equal(graphed(X), wanted)
    assert not torch.equal(wanted, te.Linear.forward(module, X))
    assert seen == {"num_warmup_iters": 5, "allow_unused_input": False, "pool": None}


def test_export_to_onnx_is_refused_with_the_reason_and_off_changes_nothing():
    with te.onnx_export(), te.onnx_export(enabled=False):
        te.Linear(32, 32)(X)
    with (
        pytest.raises(NotImplementedError, match=r"would not compute what te_hal's kernels do.*_extra_state"),
        te.onnx_export(enabled=True),
    ):
        pass
    with pytest.raises(ValueError, match="onnx_export: enabled"), te.onnx_export(enabled="no"):
        pass


@pytest.mark.parametrize(("number", "version"), [(91002, (9, 10, 2)), (8902, (8, 9, 2))])
def test_the_version_of_cudnn_is_read_as_it_counts(monkeypatch, number, version):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert te.get_cudnn_version() == version


def test_without_a_gpu_questions_about_it_are_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="list_backends"):
        te.get_cudnn_version()
    with pytest.raises(NotImplementedError, match="is_fp8_available"):
        te.get_device_compute_capability()
