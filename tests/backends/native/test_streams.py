"""On a GPU: kernels run on torch's current stream, in its order, on the device of their tensors."""

from __future__ import annotations

import native_backends
import pytest
import torch

from te_hal import ops
from te_hal.schema.formats import E4M3


@pytest.fixture
def gpu() -> native_backends.NativeBackend:
    return native_backends.cuda()


def test_two_streams_interleaved_keep_their_own_order(gpu: native_backends.NativeBackend) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    values = [torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16) * (i + 1) for i in range(2)]
    expected = [value.float().abs().amax().item() for value in values]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    with gpu.use():
        for _ in range(200):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    # Each step reads what the one before it has written on the same stream.
                    copy = values[i].clone()
                    amax = ops.amax(copy)
                    storage = ops.quantize(copy, ops.compute_scale(amax, fp8_max=E4M3.max), dtype=E4M3.dtype)
                    found[i].append(ops.amax(ops.dequantize(storage)))
                    copy.zero_()
    torch.cuda.synchronize()
    for i in range(2):
        largest = torch.cat(found[i])
        assert largest.eq(largest[0]).all()
        assert abs(largest[0].item() / expected[i] - 1) < 0.01


def test_a_kernel_waits_for_what_its_stream_waits_for(gpu: native_backends.NativeBackend) -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), gpu.use():
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        amax = ops.amax(x)
    torch.cuda.synchronize()
    assert amax.item() == 3.0


def test_kernels_can_be_captured_in_a_graph(gpu: native_backends.NativeBackend) -> None:
    x, scale = torch.ones(64, 64, device="cuda"), torch.ones(1, device="cuda")
    with gpu.use():
        out = ops.quantize(x, scale, dtype=E4M3.dtype, columnwise=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.quantize(x, scale, dtype=E4M3.dtype, columnwise=True, out=out)
            amax = ops.amax(x)
    x.fill_(-2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert amax.item() == 2.0
    assert out.rowwise_data.eq(0xC0).all()
    assert out.columnwise_data.eq(0xC0).all()
