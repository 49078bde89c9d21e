"""Cutting a projection's output: torch.split, forward and backward, in all layouts and dtypes."""

from __future__ import annotations

import pytest
import torch

from te_hal.modules.attention.cut import cut
from te_hal.schema.errors import UnsupportedError


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "wide": ((4, 2, 96), [32, 32, 32], -1, torch.bfloat16),
    "not in elements of 16 bytes": ((4, 2, 90), [30, 30, 30], -1, torch.bfloat16),
    "a start off 16 bytes": ((4, 2, 12), [4, 8], -1, torch.bfloat16),
    "groups": ((4, 2, 2, 6, 16), [4, 1, 1], -2, torch.float16),
    "fp32": ((5, 24), [8, 16], -1, torch.float32),
    "no rows": ((0, 24), [8, 16], -1, torch.float32),
}


@pytest.mark.parametrize("turned", [False, True], ids=["dense", "turned"])
@pytest.mark.parametrize(("shape", "sizes", "dim", "dtype"), CASES.values(), ids=CASES)
def test_parts_and_gradient_are_those_of_torch_split(
    shape: tuple[int, ...], sizes: list[int], dim: int, dtype: torch.dtype, turned: bool
) -> None:
    mixed = draw(*shape).to(dtype)
    grads = [part.clone() for part in torch.split(draw(*shape, seed=1).to(dtype), sizes, dim)]
    if turned:
        grads = [grad.transpose(0, 1).contiguous().transpose(0, 1) for grad in grads]
    found = []
    for function in (cut, torch.split):
        leaf = mixed.clone().requires_grad_()
        parts = function(leaf, sizes, dim)
        torch.autograd.backward(parts, grads)
        found.append([*parts, leaf.grad])
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))


def test_a_part_that_nothing_reads_has_a_gradient_of_zero() -> None:
    leaf = draw(3, 24).requires_grad_()
    cut(leaf, [8, 16], -1)[0].sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.cat([torch.ones(3, 8), torch.zeros(3, 16)], -1))


def test_without_a_gradient_parts_are_views() -> None:
    mixed = draw(3, 24)
    assert cut(mixed, [8, 16], -1)[1].data_ptr() == mixed[:, 8:].data_ptr()


def test_second_derivatives_are_refused() -> None:
    leaf = draw(3, 24).requires_grad_()
    parts = cut(leaf, [8, 16], -1)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(parts[0].square().sum(), leaf, create_graph=True)
