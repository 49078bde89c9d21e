"""Backends that keep what they gave: one buffer per shape, results by address, autograd's notes; as planted faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from faulty_backends import Fault

from te_hal.testing import Kind

if TYPE_CHECKING:
    from faulty_backends import Kernel


def one_buffer_per_shape(right: Kernel) -> Kernel:
    """Every result of a shape lies in the same memory."""
    held: dict[Any, torch.Tensor] = {}

    def kernel(*operands, **flags):
        made = right(*operands, **flags)
        if flags.get("out") is not None:
            return made
        return held.setdefault((made.shape, made.dtype), torch.empty_like(made)).copy_(made)

    return kernel


def one_buffer_of_statistics(right: Kernel) -> Kernel:
    """The statistics beside a result lie in the same memory."""
    held: dict[Any, torch.Tensor] = {}

    def rmsnorm_fwd(*operands, **flags):
        output, rstd = right(*operands, **flags)
        return output, held.setdefault(rstd.shape, torch.empty_like(rstd)).copy_(rstd)

    return rmsnorm_fwd


def keeps_results_by_address(right: Kernel) -> Kernel:
    """What was computed of an address is handed out (as a copy) for whatever lies there later."""
    held: dict[Any, torch.Tensor] = {}

    def kernel(input, *operands, **flags):
        if flags.get("out") is not None:
            return right(input, *operands, **flags)
        key = (input.data_ptr(), input.shape, input.dtype)
        if key not in held:
            held[key] = right(input, *operands, **flags)
        return held[key].clone()

    return kernel


def gives_results_that_need_grad(right: Kernel) -> Kernel:
    return lambda *operands, **flags: right(*operands, **flags).requires_grad_()


KEEPING = {
    "static gemm": Fault("gemm", one_buffer_per_shape, Kind.SHARED, "a later call hands out again", "everyday"),
    "static amax": Fault("amax", one_buffer_per_shape, Kind.SHARED, "a later call hands out again", "everyday"),
    "static scale": Fault("compute_scale", one_buffer_per_shape, Kind.SHARED, "hands out again", "everyday"),
    "static values": Fault("dequantize", one_buffer_per_shape, Kind.SHARED, "hands out again", "everyday"),
    "static softmax": Fault("softmax_fwd", one_buffer_per_shape, Kind.SHARED, "hands out again", "everyday"),
    "static statistics": Fault("rmsnorm_fwd", one_buffer_of_statistics, Kind.SHARED, "rstd lies in", "everyday"),
    "amax kept by address": Fault("amax", keeps_results_by_address, Kind.STORED, "by their address", "everyday"),
    "softmax kept by address": Fault("softmax_fwd", keeps_results_by_address, Kind.STORED, "address", "everyday"),
    "result needs grad": Fault("amax", gives_results_that_need_grad, Kind.RESULT, "requires grad", "everyday"),
}
