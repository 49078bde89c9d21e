"""gemm_fp8_nt_groupwise as mate documents it, in float64, for scales of 1x128 and 128x128 blocks in "MN" order."""

import torch

calls = []


def gemm_fp8_nt_groupwise(
    a, b, a_scale, b_scale, scale_major_mode=None, mma_sm=None, scale_granularity_mnk=None, out=None, out_dtype=None
):
    """``a`` [M, K] times ``b`` [N, K] transposed; ``a_scale`` [K/128, M], ``b_scale`` [K/128, N/128]."""
    (m, k), n = a.shape, b.shape[0]
    assert (scale_major_mode, mma_sm, scale_granularity_mnk, out) == ("MN", None, (1, 128, 128), None)
    assert a_scale.shape == (k // 128, m)
    assert b_scale.shape == (k // 128, n // 128)
    assert a_scale.dtype == b_scale.dtype == torch.float32
    assert out_dtype in (torch.bfloat16, torch.float16)
    assert all(tensor.is_contiguous() for tensor in (a, b, a_scale, b_scale))
    calls.append((m, n, k))
    left = a.double() * a_scale.t().repeat_interleave(128, 1).double()
    right = b.double() * b_scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1).double()
    return (left @ right.t()).to(out_dtype)
