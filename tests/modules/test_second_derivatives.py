"""No module has second derivatives: whoever asks for them is told, and first derivatives are those of differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_hal.modules as te
from te_hal import recipe
from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32


def written_out() -> te.DotProductAttention:
    attention = te.DotProductAttention(4, WIDTH // 4, attn_mask_type="no_mask")
    attention.always_written_out = True
    return attention


class Attend(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = written_out()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 4, WIDTH // 4)
        return self.attention(heads, heads, heads)


class Rotate(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = te.RotaryPositionEmbedding(WIDTH // 4)(x.shape[0])
        return te.apply_rotary_pos_emb(x.view(*x.shape[:2], 4, WIDTH // 4), angles).flatten(2)


def transformer() -> te.TransformerLayer:
    return te.TransformerLayer(WIDTH, 48, 4, hidden_dropout=0.0, attention_dropout=0.0)


#: How each module is made, and what its message starts with.
MODULES = {
    "Linear": (lambda: te.Linear(WIDTH, WIDTH, name="last"), "Linear"),
    "LayerNorm": (lambda: te.LayerNorm(WIDTH), "LayerNorm"),
    "RMSNorm": (lambda: te.RMSNorm(WIDTH), "RMSNorm"),
    "LayerNormLinear": (lambda: te.LayerNormLinear(WIDTH, WIDTH), "LayerNormLinear"),
    "LayerNormMLP": (lambda: te.LayerNormMLP(WIDTH, 48), "LayerNormMLP"),
    "DotProductAttention": (Attend, "DotProductAttention"),
    "MultiheadAttention": (lambda: te.MultiheadAttention(WIDTH, 4, attention_dropout=0.0), ""),
    "TransformerLayer": (transformer, ""),
    "apply_rotary_pos_emb": (Rotate, "apply_rotary_pos_emb"),
}
EACH = pytest.mark.parametrize("kind", MODULES)
REFUSED = "backward: got create_graph=True"


def batch() -> torch.Tensor:
    return torch.randn(4, 2, WIDTH)


@EACH
def test_a_gradient_penalty_is_refused_by_name(kind):
    make, name = MODULES[kind]
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), make())
    x = batch().requires_grad_()
    with pytest.raises(UnsupportedError, match=f"^{name}.*{REFUSED}.*accepted: .*retain_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


@EACH
def test_a_hessian_is_refused_instead_of_zero(kind):
    module = MODULES[kind][0]()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.functional.hessian(lambda x: module(x).square().sum(), batch())


@EACH
@pytest.mark.filterwarnings("ignore:Input #. requires gradient")  # fp32 where it would like float64
def test_gradgradcheck_is_refused(kind):
    module = MODULES[kind][0]()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.gradgradcheck(module, batch().requires_grad_())


@EACH
@pytest.mark.filterwarnings("ignore:Input #. requires gradient")  # fp32 where it would like float64
def test_first_derivatives_pass_gradcheck(kind):
    module, x = MODULES[kind][0](), batch().requires_grad_()
    assert torch.autograd.gradcheck(module, x, eps=1e-2, atol=1e-2, rtol=2e-2, fast_mode=True, nondet_tol=1e-6)


@EACH
def test_a_kept_graph_runs_again_and_its_gradients_have_no_graph(kind):
    x = batch().requires_grad_()
    y = MODULES[kind][0]()(x)
    with torch.enable_grad():
        first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@EACH
def test_recompute_and_hooks_are_no_second_derivatives(kind, reentrant):
    module, x = MODULES[kind][0](), batch().requires_grad_()
    seen = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda held: seen.append(held.grad.clone()))
    checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
    with_recompute, x.grad = x.grad, None
    module(x).square().sum().backward()
    assert torch.equal(x.grad, with_recompute)
    assert len(seen) == 2 * len(list(module.parameters()))


@pytest.mark.parametrize("format_of", [recipe.DelayedScaling, recipe.MXFP8BlockScaling], ids=["delayed", "mxfp8"])
def test_under_fp8_the_refusal_leaves_the_graph_usable_and_no_state_moved(format_of):
    module, x = te.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH, requires_grad=True)
    with te.autocast(recipe=format_of()):
        y = module(x)
    before = module.state_dict()["_extra_state"].clone()
    with pytest.raises(UnsupportedError, match=REFUSED):
        torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
    assert torch.equal(module.state_dict()["_extra_state"], before)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def hessian_or_message(attend: Callable[[torch.Tensor], torch.Tensor], heads: torch.Tensor) -> torch.Tensor | str:
    try:
        return torch.autograd.functional.hessian(lambda x: attend(x).square().sum(), heads)
    except RuntimeError as error:
        return str(error)


def plain_attention(heads: torch.Tensor) -> torch.Tensor:
    rows = heads.permute(1, 2, 0, 3)
    return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)


def test_attention_by_torchs_kernels_refuses_or_gives_second_derivatives_as_torch_does():
    attention, heads = te.DotProductAttention(4, 8, attn_mask_type="no_mask"), torch.randn(5, 2, 4, 8)
    assert attention.choice(heads, heads, heads).implementation == "torch"
    ours, torchs = hessian_or_message(lambda x: attention(x, x, x), heads), hessian_or_message(plain_attention, heads)
    assert ours == torchs if isinstance(ours, str) else torch.allclose(ours, torchs, atol=1e-5)
