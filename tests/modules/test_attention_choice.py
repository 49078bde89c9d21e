"""Which implementation computes attention: asked, decided per kind of call, and followed."""

from __future__ import annotations

import threading

import pytest
import torch
from counting_backend import Counting
from stub_backends import refuse, stub
from torch.nn.attention import SDPBackend

import te_hal
import te_hal.backends.cuda
import te_hal.dispatch
import te_hal.modules as te
from te_hal.schema.errors import RegistrationError


def operands(queries: int = 4, keys: int = 4) -> list[torch.Tensor]:
    return [torch.randn(length, 2, 2, 8, requires_grad=True) for length in (queries, keys, keys)]


MASK = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
CHOICES = {
    "no_mask": ("no_mask", None, operands(), "torch", "compute the same thing"),
    "causal": ("causal", None, operands(), "torch", "compute the same thing"),
    "causal, other sizes": ("causal", None, operands(4, 7), "torch", "compute the same thing"),
    "bottom right, square": ("causal_bottom_right", None, operands(), "torch", "compute the same thing"),
    "bottom right": ("causal_bottom_right", None, operands(4, 7), "torch", "under a mask tensor"),
    "bottom right, fewer keys": ("causal_bottom_right", None, operands(7, 4), "torch", "that see no key are set to 0"),
    "padding": ("padding", MASK, operands(), "torch", "that see no key are set to 0"),
    "padding_causal": ("padding_causal", MASK, operands(), "torch", "under a mask tensor"),
    "arbitrary": ("arbitrary", MASK, operands(), "torch", "under a mask tensor"),
    "no keys": ("no_mask", None, operands(4, 0), "written_out", "no queries or no keys"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_is_made_by_kind_of_call_and_says_why(name):
    mask_type, mask, inputs, implementation, reason = CHOICES[name]
    module = te.DotProductAttention(2, 8)
    choice = module.choice(*inputs, mask, attn_mask_type=mask_type)
    assert choice.implementation == implementation
    assert reason in choice.reason
    module.always_written_out = True
    assert module.choice(*inputs, mask, attn_mask_type=mask_type).implementation == "written_out"


@pytest.mark.parametrize("name", CHOICES)
def test_what_was_chosen_is_what_runs(name, monkeypatch):
    mask_type, mask, inputs, implementation, _ = CHOICES[name]
    counting, by_torch = Counting(), []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: by_torch.append(1) or original(*args, **kwargs),
    )
    module = te.DotProductAttention(2, 8)
    with te_hal.use_backend("counting"):
        module.choice(*inputs, mask, attn_mask_type=mask_type)
        assert not counting.launches
        assert not by_torch
        module(*inputs, mask, attn_mask_type=mask_type).sum().backward()
    assert len(by_torch) == (implementation == "torch")
    assert counting.count("softmax_fwd") == counting.count("softmax_bwd") == (implementation == "written_out")


@pytest.mark.parametrize(
    ("places", "names"),
    [((), {"attn_masktype": "padding"}), ((None,) * 30, {}), ((), {"query_layer": MASK})],
    ids=["a name that forward lacks", "too many", "twice"],
)
def test_the_choice_takes_arguments_of_a_call_and_no_others(places, names):
    with pytest.raises(TypeError, match="argument"):
        te.DotProductAttention(2, 8).choice(*operands(), *places, **names)


def test_backward_uses_the_softmax_of_its_forward():
    first, second = Counting("first"), Counting("second")
    module = te.DotProductAttention(2, 8, attn_mask_type="padding", softmax_type="off-by-one")
    with te_hal.use_backend("first"):
        y = module(*operands(), MASK)
    with te_hal.use_backend("second"):
        y.sum().backward()
        module(*operands(), MASK)
    assert first.count("softmax_bwd") == 1
    assert second.count("softmax_bwd") == 0
    assert second.count("softmax_fwd") == 1


def test_a_backend_without_the_softmax_is_refused_before_anything_runs():
    te_hal.dispatch.register_backend(stub("poor", supports=refuse("never")))
    module = te.DotProductAttention(2, 8)
    with te_hal.use_backend("poor"):
        module(*operands())
        with pytest.raises(NotImplementedError, match="softmax_fwd on backend poor"):
            module(*operands(), core_attention_bias_type="alibi")


def sdpa_choices(monkeypatch: pytest.MonkeyPatch) -> list[SDPBackend]:
    """Fills with the kernel that torch would take at each call."""
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def noting(query, key, value, **kwargs):
        rest = (None, kwargs["dropout_p"], kwargs["is_causal"])
        seen.append(SDPBackend(torch._fused_sdp_choice(query, key, value, *rest, scale=kwargs["scale"])))
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    return seen


def test_the_kernels_that_a_backend_asks_for_are_asked_for_in_each_call_and_only_there(monkeypatch):
    te_hal.dispatch.register_backend(stub("plain", sdpa_kernels=("MATH",)))
    seen = sdpa_choices(monkeypatch)
    module, inputs = te.DotProductAttention(2, 8), operands()
    free = module(*inputs)
    with te_hal.use_backend("plain"):
        assert module.choice(*inputs).kernels == ("MATH",)
        torch.testing.assert_close(module(*inputs), free)
    module(*inputs)
    assert seen == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


def test_threads_that_ask_for_kernels_leave_torchs_own_order_behind(monkeypatch):
    te_hal.dispatch.register_backend(stub("plain", sdpa_kernels=("MATH",)))
    module, inputs = te.DotProductAttention(2, 8), operands()

    def attend() -> None:
        with te_hal.use_backend("plain"):
            for _ in range(50):
                module(*inputs)

    threads = [threading.Thread(target=attend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sdpa_choices(monkeypatch)
    module(*inputs)
    assert seen == [SDPBackend.FLASH_ATTENTION]


def test_the_cuda_backend_asks_for_cudnn_first_and_names_kernels_that_torch_has():
    kernels = te_hal.backends.cuda.create_backend().sdpa_kernels
    assert kernels[0] == "CUDNN_ATTENTION"
    assert set(kernels) <= set(SDPBackend.__members__)
    assert kernels[-1] == "MATH"  # takes what no other does


@pytest.mark.parametrize("kernels", [["MATH"], ("math",), "MATH", None, (1,)], ids=repr)
def test_a_backend_that_asks_for_kernels_torch_does_not_have_is_refused(kernels):
    with pytest.raises(RegistrationError, match="sdpa_kernels"):
        te_hal.dispatch.register_backend(stub("odd", sdpa_kernels=kernels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_for_backward(dtype):
    length, heads, channels = 64, 2, 8
    score_bytes = heads * length * length * dtype.itemsize
    kept = []

    def bytes_kept(module: te.DotProductAttention, mask: torch.Tensor | None = None) -> int:
        inputs = [torch.randn(length, 1, heads, channels, dtype=dtype, requires_grad=True) for _ in range(3)]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            module(*inputs, mask, attn_mask_type="causal" if mask is None else "padding")
        return sum(kept)

    module = te.DotProductAttention(heads, channels)
    of_each = length * heads * channels * dtype.itemsize
    assert bytes_kept(module) <= 4 * of_each + 8 * length * heads  # q, k, v, output, and a number per row
    masked = bytes_kept(module, torch.arange(length).view(1, 1, 1, -1) > 50)
    assert masked <= 4 * of_each + 8 * length * heads + 5 * length * length + length  # and a mask for all heads
    module.always_written_out = True
    assert bytes_kept(module) == 3 * of_each + score_bytes
    module.attention_dropout = 0.5
    assert bytes_kept(module) == 3 * of_each + score_bytes + heads * length * length
