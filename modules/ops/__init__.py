"""Ops that are fused with their neighbours: ``import te_hal.modules as te`` and ``te.ops``.

>>> mlp = te.ops.Sequential(
...     te.ops.LayerNorm(1024),
...     te.ops.Linear(1024, 4096),
...     te.ops.GELU(),
...     te.ops.Linear(4096, 1024),
... )
>>> with te.autocast(recipe=recipe.DelayedScaling()):
...     y = mlp(x)

Each op also runs alone. What is fused, and with what rounding, is in docs/fusible_ops.md; after a forward,
``te_hal.explain(mlp)`` names what runs.
"""

from te_hal.modules.ops.activation import GEGLU, GELU, GLU, QGEGLU, QGELU, ReGLU, ReLU, SiLU, SReGLU, SReLU
from te_hal.modules.ops.basic_linear import BasicLinear
from te_hal.modules.ops.bias import Bias
from te_hal.modules.ops.communication import (
    AllGather,
    AllReduce,
    ReduceScatter,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from te_hal.modules.ops.extra_tensors import AddExtraInput, MakeExtraOutput
from te_hal.modules.ops.fused_operation import FusedOperation
from te_hal.modules.ops.gated_activation import (
    ClampedSwiGLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiTUGLU,
    SwiGLU,
)
from te_hal.modules.ops.grouped_linear import GroupedLinear
from te_hal.modules.ops.linear import Linear
from te_hal.modules.ops.norms import L2Normalization, LayerNorm, RMSNorm
from te_hal.modules.ops.operation import BasicOperation, FusibleOperation
from te_hal.modules.ops.plain import ConstantScale, Dropout, Identity, Reshape
from te_hal.modules.ops.quantize import Quantize
from te_hal.modules.ops.sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
