"""FP8FwdTensorIdx and FP8BwdTensorIdx: names of the slots in a module's ``quantizers`` and scaling state."""

from __future__ import annotations

from enum import IntEnum


class FP8FwdTensorIdx(IntEnum):
    """Slots of ``quantizers["scaling_fwd"]``; of GroupedLinear's further groups they go on in the same order."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensorIdx(IntEnum):
    """Slots of ``quantizers["scaling_bwd"]``."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5
