"""get_cpu_offload_context: gradients are the same, and what a layer keeps is on the device no more.

No accelerator is needed: a transfer that takes CPU tensors for device memory stands in for one.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformer_bytes import LayerSize, activation_bytes, bytes_kept, weight_bytes

import te_hal.modules as te
from te_hal import recipe
from te_hal.modules.cpu_offload import OffloadedLayers
from te_hal.modules.offload_marks import collects, stays
from te_hal.schema.errors import StateError

SIZE = LayerSize(tokens=64, hidden=64, ffn=128, heads=4)
RECIPES = {"plain": None, "delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}
LAYERS = 3


class Host:
    """A transfer between CPU memory, which stands for a device's, and copies of it."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.left: list[StorageWeakRef] = []
        self.fetched: list[int] = []
        self.released = 0

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def to_host(self, buffer: torch.Tensor) -> torch.Tensor:
        self.moved.append(buffer.nbytes)
        self.left.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer.clone()

    def to_device(self, copy: torch.Tensor) -> torch.Tensor:
        self.fetched.append(copy.nbytes)
        return copy.clone()

    def await_device(self, buffer: torch.Tensor) -> None:
        assert buffer.numel() > 0

    def release(self, copy: torch.Tensor) -> None:
        self.released += copy.numel() > 0

    @property
    def still_there(self) -> int:
        gc.collect(1)
        return sum(not reference.expired() for reference in self.left)


def model(**given) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        te.TransformerLayer(
            *(SIZE.hidden, SIZE.ffn, SIZE.heads),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            **given,
        )
        for _ in range(LAYERS)
    )


def forward(layers, x: torch.Tensor, name: str, offloaded: OffloadedLayers | None = None) -> torch.Tensor:
    chosen = RECIPES[name]
    with te.autocast(enabled=chosen is not None, recipe=None if chosen is None else chosen()):
        for layer in layers:
            if offloaded is None:
                x = layer(x)
                continue
            with offloaded:
                x = layer(x)
            x = offloaded.synchronize(x)
    return x


def data() -> torch.Tensor:
    return torch.randn(16, 4, SIZE.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_bit_for_bit_those_without(name, count):
    results = []
    for offloads in (False, True):
        layers, x = model(), data()
        offloaded = OffloadedLayers(count, LAYERS, Host()) if offloads else None
        for _ in range(2):
            y = forward(layers, x, name, offloaded)
            y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layers.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", RECIPES)
def test_what_moves_is_what_a_layer_keeps_but_for_weights(name):
    host, layers = Host(), model()
    y = forward(layers[:1], data(), name, OffloadedLayers(1, 1, host))
    kept = bytes_kept(layers[0], lambda: forward(layers[:1], data(), name))
    fp8 = name != "plain"
    assert kept == activation_bytes(SIZE, fp8=fp8) + (weight_bytes(SIZE) if fp8 else 0)
    scales = 4 * 4 if fp8 else 0  # one of each operand, too small to be worth the way
    weights = weight_bytes(SIZE) - 2 * scales if fp8 else 0
    assert sum(host.moved) == kept - weights - 2 * scales
    assert y.requires_grad


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_that_moved_is_left_on_the_device_until_the_backward(name):
    host, layers = Host(), model()
    x = data()
    y = forward(layers, x, name, OffloadedLayers(LAYERS, LAYERS, host))
    assert host.still_there == 1  # the model's input, which the caller holds
    assert host.fetched == []
    y.float().sum().backward()
    assert sorted(host.fetched) == sorted(host.moved)
    del y
    gc.collect(1)
    assert host.released == len(host.moved)


def test_only_the_first_layers_are_offloaded_and_every_forward_counts_anew():
    host, layers = Host(), model()
    offloaded, counts = OffloadedLayers(1, LAYERS, host), []
    for _ in range(2):
        forward(layers, data(), "plain", offloaded).float().sum().backward()
        counts.append(len(host.moved))
    assert counts[1] == 2 * counts[0] > 0


def test_after_a_forward_that_raised_the_next_one_begins_with_the_first_layer():
    host, layers = Host(), model()
    offloaded = OffloadedLayers(1, LAYERS, host)
    with pytest.raises(OSError, match="the loader"), offloaded:
        raise OSError("the loader has failed")
    forward(layers, data(), "plain", offloaded)
    alone = Host()
    forward(layers, data(), "plain", OffloadedLayers(1, LAYERS, alone))
    assert host.moved == alone.moved != []


def test_the_way_back_begins_a_layer_ahead():
    host, layers, begun = Host(), model(), []
    offloaded = OffloadedLayers(LAYERS, LAYERS, host)
    x = data()
    for layer in layers:
        with offloaded:
            x = layer(x)
        x = offloaded.synchronize(x)
        if x.requires_grad:
            x.register_hook(lambda _: begun.append(len(host.fetched)))
    x.float().sum().backward()
    per_layer = len(host.moved) // LAYERS
    assert begun == [0, 2 * per_layer, 3 * per_layer]


def test_views_of_one_memory_move_once_and_keep_their_strides():
    host, seen = Host(), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.sum() + b.sum()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return grad.expand(4, 8), grad.expand(4, 8)

    mixed = torch.randn(4, 16, requires_grad=True)
    offloaded = OffloadedLayers(1, 1, host)
    with offloaded:
        y = Look.apply(*(mixed * 1).chunk(2, dim=1))
    y.backward()
    assert host.moved == [4 * 16 * 4]
    assert [tensor.stride() for tensor in seen] == [(16, 1), (16, 1)]
    assert torch.equal(torch.cat(seen, dim=1), mixed)
    assert seen[0].untyped_storage().data_ptr() == seen[1].untyped_storage().data_ptr()


def test_memory_that_was_written_to_between_two_layers_keeps_both_values():
    buffer, weight = torch.zeros(2, 16), torch.ones(16, requires_grad=True)
    with OffloadedLayers(1, 1, Host()):
        first = buffer[0] * weight
        buffer[1] = 5.0
        second = buffer[1] * weight
    (first + second).sum().backward()
    assert torch.equal(weight.grad, torch.full((16,), 5.0))


def test_marked_tensors_and_parameters_of_any_module_stay():
    host, linear = Host(), torch.nn.Linear(32, 32)
    x, other = torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)
    te.mark_not_offload(other)
    with OffloadedLayers(1, 1, host):
        y = linear(x) * other
    assert host.moved == [x.nbytes]
    y.sum().backward()
    assert not collects()
    with pytest.raises(TypeError, match="mark_not_offload: got a str"):
        te.mark_not_offload("x")


def test_a_mark_goes_with_its_tensor_and_no_other():
    first = torch.randn(4, 32)
    other = torch.empty(0).set_(first.untyped_storage(), 0, (128,))  # a view would keep the first alive
    te.mark_not_offload(first)
    assert stays(other)
    te.mark_not_offload(first.view(2, 64))  # which is gone at once
    assert stays(other)
    del first
    assert not stays(other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_goes_with_recompute(reentrant):
    results = []
    for offloads in (False, True):
        layers, x, host = model(), data(), Host()
        offloaded = OffloadedLayers(LAYERS, LAYERS, host)
        with te.autocast(recipe=recipe.DelayedScaling()):
            h = x
            for layer in layers:
                if not offloads:
                    h = layer(h)
                    continue
                with offloaded:
                    h = te.checkpoint(layer, h, use_reentrant=reentrant)
                h = offloaded.synchronize(h)
        assert len(host.moved) == (LAYERS if offloads else 0)  # inputs
        h.float().square().sum().backward()
        results.append([x.grad, *(p.grad for p in layers.parameters())])
    assert all(map(torch.equal, *results))


def test_on_the_cpu_there_is_nothing_to_offload_to():
    context, synchronize = te.get_cpu_offload_context(enabled=True)
    layer, x = te.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match="nothing to offload to"), context:
        layer(x)
    assert not collects()
    with torch.no_grad(), context:  # where nothing is kept
        layer(x)
    assert synchronize(x) is not None


def test_without_enabled_nothing_happens():
    context, synchronize = te.get_cpu_offload_context()
    layer, x = te.Linear(32, 32), torch.randn(8, 32)
    with context:
        y = layer(x)
    assert synchronize(y) is y


#: Arguments and what is said of them.
WRONG = {
    "weights": ({"offload_weights": True}, NotImplementedError, "parameters stay on the device"),
    "double_buffering": ({"double_buffering": True}, NotImplementedError, "double_buffering: got True.*leave it out: "),
    "manual": ({"manual_synchronization": True}, NotImplementedError, "manual_synchronization: got True"),
    "layers": ({"num_layers": 0}, ValueError, "num_layers: got 0"),
    "more_layers": ({"num_layers": 3, "model_layers": 2}, ValueError, "at most model_layers"),
    "flag": ({"enabled": 1}, ValueError, "enabled"),
    "nothing": ({"enabled": True, "offload_activations": False}, ValueError, "offload_activations: got False"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_by_name(case):
    given, error, said = WRONG[case]
    with pytest.raises(error, match=said):
        te.get_cpu_offload_context(**given)


def test_a_context_is_entered_once_at_a_time():
    offloaded = OffloadedLayers(1, 1, Host())
    with offloaded, pytest.raises(StateError, match="already entered"), offloaded:
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("name", RECIPES)
def test_on_a_device_memory_is_lower_and_gradients_are_the_same(name):
    results, held = [], []
    for enabled in (False, True):
        layers, x = model(device="cuda"), data().cuda().detach().requires_grad_()
        context, synchronize = te.get_cpu_offload_context(enabled=enabled, num_layers=LAYERS, model_layers=LAYERS)
        before, h, chosen = torch.cuda.memory_allocated(), x, RECIPES[name]
        with te.autocast(enabled=chosen is not None, recipe=None if chosen is None else chosen()):
            for layer in layers:
                with context:
                    h = layer(h)
                h = synchronize(h)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        h.float().square().sum().backward()
        results.append([x.grad, *(p.grad for p in layers.parameters())])
    assert held[1] < held[0] / 2
    assert all(map(torch.equal, *results))
