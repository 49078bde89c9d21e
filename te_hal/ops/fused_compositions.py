"""Compositions of the fused ops: the contract that every fused kernel is held against (docs/numerics.md, F1 to F3).

``parts`` has the kernels of the ops that a composition calls (te_hal.ops.fused_parts says which).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import register_composition
from te_hal.ops.fused_parts import activation_parts, bias_grad_parts, norm_parts, quantize_parts
from te_hal.schema.formats import ScalingMode, element_format

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage


def _quantize_current(
    parts: Any,  # noqa: ANN401 - kernels by name
    input: torch.Tensor,
    *,
    out: QuantizedStorage | None = None,
    dtype: torch.dtype,
    rowwise: bool = True,
    columnwise: bool = False,
    columnwise_order: str = "transposed",
    amax_epsilon: float = 0.0,
    power_of_2: bool = False,
) -> QuantizedStorage:
    scale = parts.compute_scale(
        parts.amax(input), fp8_max=element_format(dtype).max, epsilon=amax_epsilon, power_of_2=power_of_2
    )
    made: QuantizedStorage = parts.quantize(
        input,
        scale,
        out=out,
        dtype=dtype,
        rowwise=rowwise,
        columnwise=columnwise,
        columnwise_order=columnwise_order,
    )
    return made


def _layernorm_quantize(
    parts: Any,  # noqa: ANN401
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    **cast: Any,  # noqa: ANN401 - the settings of the cast, passed on
) -> tuple[QuantizedStorage, torch.Tensor, torch.Tensor]:
    between = input.dtype if scale is None else torch.float32
    normalised, mean, rstd = parts.norm(
        input, weight, bias, epsilon=epsilon, zero_centered_gamma=zero_centered_gamma, out_dtype=between
    )
    return _cast(parts, normalised, input.dtype, scale, amax, cast), mean, rstd


def _rmsnorm_quantize(
    parts: Any,  # noqa: ANN401
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    zero_centered_gamma: bool = False,
    **cast: Any,  # noqa: ANN401
) -> tuple[QuantizedStorage, torch.Tensor]:
    between = input.dtype if scale is None else torch.float32
    normalised, rstd = parts.norm(
        input, weight, epsilon=epsilon, zero_centered_gamma=zero_centered_gamma, out_dtype=between
    )
    return _cast(parts, normalised, input.dtype, scale, amax, cast), rstd


def _activation_quantize(
    parts: Any,  # noqa: ANN401
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    **cast: Any,  # noqa: ANN401
) -> QuantizedStorage:
    result = parts.activation(
        input,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        out_dtype=torch.float32,
    )
    return _cast_computed(parts, result, input.dtype, scale, amax, cast)[0]


def _activation_bwd_quantize(
    parts: Any,  # noqa: ANN401
    grad_output: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    glu_linear_offset: float | None = None,
    bias_grad: bool = False,
    **cast: Any,  # noqa: ANN401
) -> tuple[QuantizedStorage, torch.Tensor | None]:
    result = parts.activation(
        grad_output,
        input,
        activation=activation,
        limit=limit,
        alpha=alpha,
        glu_linear_offset=glu_linear_offset,
        out_dtype=torch.float32,
    )
    storage, values = _cast_computed(parts, result, input.dtype, scale, amax, cast)
    if not bias_grad:
        return storage, None
    return storage, parts.bias_grad(values.reshape(-1, values.shape[-1]), out_dtype=input.dtype)


def _bias_grad_quantize(
    parts: Any,  # noqa: ANN401
    grad_output: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
    **cast: Any,  # noqa: ANN401
) -> tuple[QuantizedStorage, torch.Tensor]:
    grad_bias = parts.bias_grad(grad_output, out_dtype=grad_output.dtype)
    return _cast(parts, grad_output, grad_output.dtype, scale, amax, cast), grad_bias


def _cast_computed(
    parts: Any,  # noqa: ANN401
    fp32: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    cast: dict[str, Any],
) -> tuple[QuantizedStorage, torch.Tensor]:
    """The cast of an activation's fp32 result, and what was cast (F2, F3): its own scale comes from before rounding."""
    if scale is not None:
        return _cast(parts, fp32, dtype, scale, amax, cast), fp32
    rounded = fp32.to(dtype)
    if cast.get("mode", ScalingMode.TENSOR) != ScalingMode.TENSOR:
        return _cast(parts, rounded, dtype, None, None, cast), rounded
    settings = _Settings(cast)
    own = parts.compute_scale(
        parts.amax(fp32),
        fp8_max=element_format(settings.copies["dtype"]).max,
        epsilon=settings.amax_epsilon,
        power_of_2=settings.power_of_2,
    )
    return parts.quantize(rounded, own, **settings.copies), rounded


def _cast(
    parts: Any,  # noqa: ANN401
    values: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    cast: dict[str, Any],
) -> QuantizedStorage:
    """The cast of ``values`` as they are; the result's nominal dtype is ``dtype``."""
    settings = _Settings(cast)
    own = {"amax_epsilon": settings.amax_epsilon, "power_of_2": settings.power_of_2}
    storage: QuantizedStorage
    if scale is not None:
        storage = parts.quantize(values, scale, amax=amax, **settings.copies)
    elif settings.mode == ScalingMode.TENSOR:
        storage = parts.quantize_current(values, **settings.copies, **own)
    else:
        seed = settings.rounding_seed
        storage = parts.quantize(values, mode=settings.mode, **settings.copies, **own, rounding_seed=seed)
    return storage if storage.dtype is dtype else storage.with_tensors(storage.tensors(), dtype)


class _Settings:
    """The settings of a cast, apart: which copies, which mode, what shapes a scale of its own, and how to round."""

    def __init__(self, cast: dict[str, Any]) -> None:
        self.copies = dict(cast)
        self.mode = self.copies.pop("mode", ScalingMode.TENSOR)
        self.amax_epsilon: float = self.copies.pop("amax_epsilon", 0.0)
        self.power_of_2: bool = self.copies.pop("power_of_2", False)
        self.rounding_seed: int | None = self.copies.pop("rounding_seed", None)


register_composition("quantize_current", _quantize_current, quantize_parts)
register_composition("layernorm_quantize", _layernorm_quantize, norm_parts)
register_composition("rmsnorm_quantize", _rmsnorm_quantize, norm_parts)
register_composition("activation_quantize", _activation_quantize, activation_parts)
register_composition("activation_bwd_quantize", _activation_bwd_quantize, activation_parts)
register_composition("bias_grad_quantize", _bias_grad_quantize, bias_grad_parts)
