"""Sizes under FP8: leading ones divisible by 8 together, the last by 16, on every backend; any size without."""

from __future__ import annotations

import pytest
import torch

import te_hal
import te_hal.modules as te

#: in, out features; input shape; what the message must say.
REFUSED = {
    "in_features": (767, 3072, (8, 767), ["input", "767", "divisible by 16", "pad it to 768"]),
    "one_row": (256, 256, (1, 256), ["input", "(1, 256)", "divisible by 8", "pad it to 8"]),
    "fifty_rows": (256, 256, (50, 256), ["input", "(50, 256)", "divisible by 8", "pad it to 56"]),
    "product_of_leading": (256, 256, (2, 3, 256), ["input", "(2, 3, 256)", "leading sizes, 6", "pad it to 8"]),
    "vector": (256, 256, (256,), ["input", "leading sizes, 1", "divisible by 8"]),
    "out_features": (256, 100, (8, 256), ["weight", "(100, 256)", "out_features, 100", "pad it to 104"]),
}


@pytest.mark.parametrize("backend", ["cpu_reference", "null"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_size_that_fp8_cannot_take_is_refused_with_the_way_out(name, backend):
    in_features, out_features, shape, said = REFUSED[name]
    module = te.Linear(in_features, out_features, name="decoder.proj")
    with te_hal.use_backend(backend), pytest.raises(ValueError, match=r"'decoder.proj'") as caught, te.autocast():
        module(torch.randn(shape))
    for part in [*said, "te.autocast(enabled=False)"]:
        assert part in str(caught.value)


def test_a_refused_call_changes_nothing():
    module, x = te.Linear(256, 256), torch.randn(8, 256)
    with te.autocast():
        module(x)
    before = module.fp8_meta["scaling_fwd"].amax_history.clone()
    with te.autocast(), pytest.raises(ValueError, match="divisible by 8"):
        module(torch.randn(3, 256))
    assert torch.equal(module.fp8_meta["scaling_fwd"].amax_history, before)


@pytest.mark.parametrize("shape", [(2, 4, 256), (8, 256), (1, 8, 1, 256), (0, 256)], ids=str)
def test_the_product_of_leading_sizes_counts(shape):
    with te.autocast():
        assert te.Linear(256, 264)(torch.randn(shape)).shape == (*shape[:-1], 264)


@pytest.mark.parametrize("shape", [(767,), (1, 767), (3, 5, 767)], ids=str)
def test_any_size_runs_without_fp8(shape):
    module = te.Linear(767, 13)
    x = torch.randn(shape)
    exact = x.double() @ module.weight.detach().double().T
    assert (module(x).double() - exact).norm() <= 3e-6 * exact.norm()
    with te.autocast(), te.autocast(enabled=False):
        module(x).sum().backward()


def test_calibrating_takes_any_size():
    with te.autocast(enabled=False, calibrating=True):
        te.Linear(767, 13)(torch.randn(3, 767))
