"""The operands of a link as a call finds them, in the activation dtype, and where in its chain a link stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed, parameters_dtype, plain_input
from te_hal.modules.call_checks import check_call, check_parameter
from te_hal.modules.norm_function import NormKey
from te_hal.modules.normalization import Normalization
from te_hal.modules.ops.input_checks import wrong_size
from te_hal.quantization import Float8Tensor

if TYPE_CHECKING:
    from te_hal.modules.activation_stage import ActivationKey
    from te_hal.modules.gemm_parameters import Read
    from te_hal.modules.ops.activation import Activation
    from te_hal.modules.ops.chain_function import LinkCall
    from te_hal.modules.ops.link import Link
    from te_hal.modules.plan_key import PlanKey
    from te_hal.quantization.autocast import Frame


class Place(NamedTuple):
    """Where in a chain a link stands.

    Attributes:
        input: of the chain; behind its first link in the activation dtype.
        shape: of what the link gets.
        needs_dgrad: something before needs a gradient.
        before: the product of the link before; None for the first.
    """

    input: torch.Tensor
    shape: tuple[int, ...]
    needs_dgrad: bool
    before: PlanKey | None


class Operands(NamedTuple):
    """Of a link, in the activation dtype.

    Attributes:
        input: of the chain; a plain stand-in behind the first link of one that begins with a quantized input.
        gamma, beta: of its norm; None without.
        weight, bias: of its product; bias None without.
        front_key: what computes the product's input.
        needs_dgrad: something before the product needs a gradient.
    """

    input: torch.Tensor
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    front_key: NormKey | ActivationKey | None
    needs_dgrad: bool

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What autograd sees, the chain's input aside."""
        return self.gamma, self.beta, self.weight, self.bias

    def place_after(self, place: Place, out_features: int, product: PlanKey) -> Place:
        """Of the next link."""
        behind = self.needs_dgrad or any(tensor is not None and tensor.requires_grad for tensor in self.tensors)
        return Place(self.input, (*place.shape[:-1], out_features), behind, product)


class Prepared(NamedTuple):
    """What a link will run: what the autograd Function needs of it, and where the next one stands.

    Attributes:
        call: everything but tensors.
        operands: of the link.
        quantized: the weight that the gemms read under FP8.
        after: of the next link.
    """

    call: LinkCall
    operands: Operands
    quantized: Any
    after: Place


def operands_of(link: Link, place: Place, frame: Frame, read: Read) -> Operands:
    """Check and cast what a link reads.

    Raises:
        ArgumentTypeError, ArgumentError: shapes, dtypes or devices that do not fit.
        UnsupportedError: a transform of torch.func; an FP8 forward inside a backward that recomputes nothing.
    """
    label = link.linear.label
    _check_width(link, place, frame)
    norm = link.front if isinstance(link.front, Normalization) else None
    _check_parameters(link, norm)
    found: dict[str, torch.Tensor | None] = {
        "gamma": None if norm is None else norm.weight,
        "beta": None if norm is None else norm.bias,
        "weight": read.weight,
        "bias": None if link.bias is None else link.bias.bias,
    }
    dtype = (parameters_dtype if place.before is None else activation_dtype)(label, place.input, **found)
    given = _input_of(link, place, frame, dtype)
    gamma, beta, weight, bias = (None if each is None else cast_if_needed(each, dtype) for each in found.values())
    front: NormKey | ActivationKey | None = None
    if norm is not None:
        front = NormKey(norm.op, dtype, given.device, norm.eps, norm.zero_centered_gamma)
    elif link.front is not None:
        front = cast("Activation", link.front).key(dtype, given.device)
    needs = place.needs_dgrad or any(each is not None and each.requires_grad for each in (gamma, beta))
    return Operands(given, gamma, beta, weight, bias, front, needs)  # type: ignore[arg-type] # there is a weight


def _input_of(link: Link, place: Place, frame: Frame, dtype: torch.dtype) -> torch.Tensor:
    """The chain's input for its first link, which may read it quantized; a plain stand-in for the others."""
    if place.before is not None:
        quantized = isinstance(place.input, Float8Tensor)
        return torch.empty(0, dtype=dtype, device=place.input.device) if quantized else place.input
    if frame.enabled and link.front is None and isinstance(place.input, Float8Tensor):
        return place.input
    return plain_input(place.input, dtype)


def _check_width(link: Link, place: Place, frame: Frame) -> None:
    linear, size, name = link.linear, link.linear.in_features, "in_features"
    if isinstance(link.front, Normalization):
        (size,), name = link.front.normalized_shape, "normalized_shape"
    elif link.front is not None and link.front.gated:
        size, name = 2 * size, "twice in_features for a gated activation"
    if place.before is None:
        check_call(linear, place.input, (name, size), None, frame)
    elif place.shape[-1] != size:
        raise wrong_size((link.front or linear).label, place.shape, size, name)
    if isinstance(link.front, Normalization) and size != linear.in_features:
        raise wrong_size(linear.label, (*place.shape[:-1], size), linear.in_features, "in_features")


def _check_parameters(link: Link, norm: Normalization | None) -> None:
    """Bound kernels check no shapes, and parameters can be replaced."""
    if norm is not None:
        for name, parameter in norm.named_parameters(recurse=False):
            check_parameter(type(norm).__name__, name, parameter, norm.normalized_shape)
    if link.bias is not None:
        check_parameter(link.bias.label, "bias", link.bias.bias, (link.linear.out_features,))
