"""Quantizers that make no codes: products take what they give as a plain tensor."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from te_hal.quantization.quantizer import OPS, CastKernels, Quantizer
from te_hal.schema.errors import ArgumentError, StateError
from te_hal.schema.formats import E4M3, FLOATS

if TYPE_CHECKING:
    from te_hal.schema.storage import QuantizedStorage


class UnquantizedQuantizer(Quantizer):
    """Base of quantizers whose operand is a plain tensor in the activation dtype; usages have no meaning here."""

    quantizes = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(E4M3.dtype, rowwise=rowwise, columnwise=columnwise)  # a format that nobody reads

    @abc.abstractmethod
    def simulate(self, tensor: torch.Tensor) -> torch.Tensor:
        """What products multiply in place of ``tensor``: same shape, dtype and device, without autograd."""

    def operand(
        self, tensor: torch.Tensor, *, rowwise: bool, columnwise: bool, kernels: CastKernels = OPS
    ) -> torch.Tensor:
        """See :meth:`Quantizer.operand`."""
        del rowwise, columnwise, kernels
        return self.simulate(tensor)

    def quantize_storage(
        self,
        tensor: torch.Tensor,  # noqa: ARG002
        *,
        rowwise: bool = True,  # noqa: ARG002
        columnwise: bool = False,  # noqa: ARG002
        out: QuantizedStorage | None = None,  # noqa: ARG002
        kernels: CastKernels = OPS,  # noqa: ARG002
    ) -> QuantizedStorage:
        """Refused: there are no codes.

        Raises:
            StateError: always.
        """
        self._refuse("quantize_storage")

    def fused_arguments(self, *, rowwise: bool, columnwise: bool) -> dict[str, Any]:  # noqa: ARG002
        """Refused, as :meth:`quantize_storage`.

        Raises:
            StateError: always.
        """
        self._refuse("fused_arguments")

    def make_empty(  # type: ignore[override] # a plain tensor in place of a quantized one
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """A plain tensor with uninitialised values; arguments as of :meth:`Quantizer.make_empty`."""
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad, pin_memory=pin_memory)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Nothing to record."""

    def _refuse(self, method: str) -> NoReturn:
        raise StateError(
            f"{type(self).__name__}.{method}",
            got="a quantizer without codes",
            accepted="quantize(tensor), which gives a plain tensor",
            todo="use one of te.Float8Quantizer and its like for codes",
        )


class IdentityQuantizer(UnquantizedQuantizer):
    """Leaves tensors as they are, for roles of a CustomRecipe that stay in high precision.

    Args:
        dtype: round to this dtype first; None: do nothing.
        rowwise, columnwise: without effect, as in Transformer Engine.

    Raises:
        ArgumentError: a dtype that products do not take.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        if dtype is not None and dtype not in FLOATS:
            accepted = ", ".join(map(str, (None, *FLOATS)))
            raise ArgumentError("IdentityQuantizer: dtype", got=repr(dtype), accepted=accepted, todo="correct it")
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.rounds_to = dtype

    def simulate(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, rounded where the quantizer rounds."""
        return tensor if self.rounds_to is None else tensor.to(self.rounds_to).to(tensor.dtype)

    def quantize(  # type: ignore[override] # a plain tensor in place of a quantized one
        self, tensor: torch.Tensor, *, out: None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``tensor`` in ``dtype``, else in the quantizer's dtype; gradients pass as through ``Tensor.to``.

        Raises:
            StateError: ``out`` is given.
        """
        if out is not None:
            self._refuse("quantize with out")
        return tensor.to(dtype or self.rounds_to or tensor.dtype)

    __call__ = quantize  # type: ignore[assignment]


class PythonQuantizer(UnquantizedQuantizer):
    """A user's object with methods ``quantize`` and ``dequantize``; products take what the second one gives.

    ``quantize`` gets a copy, so that one that writes in place changes no weight and no caller's input.

    Args:
        made: the object.
    """

    def __init__(self, made: Any) -> None:  # noqa: ANN401 - the user's
        super().__init__()
        self.made = made

    def simulate(self, tensor: torch.Tensor) -> torch.Tensor:
        """``dequantize(quantize(tensor))``, in the dtype of ``tensor``.

        Raises:
            ArgumentError: no tensor, or another shape or device.
        """
        with torch.no_grad():
            result = self.made.dequantize(self.made.quantize(tensor.detach().clone()))
        fits = isinstance(result, torch.Tensor) and result.shape == tensor.shape and result.device == tensor.device
        if not fits:
            is_tensor = isinstance(result, torch.Tensor)
            raise ArgumentError(
                f"CustomRecipe: {type(self.made).__name__}.dequantize",
                got=f"{tuple(result.shape)} on {result.device}" if is_tensor else f"a {type(result).__name__}",
                accepted=f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}",
                todo="return what products shall multiply in place of what quantize got",
            )
        simulated: torch.Tensor = result.detach().to(tensor.dtype)
        return simulated
