"""Quantizers that make no codes: products take what they give as a plain tensor."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from te_hal.quantization.identity_storage import IdentityMode, IdentityStorage
from te_hal.quantization.quantized_tensor import wrap
from te_hal.quantization.quantizer import OPS, CastKernels, Quantizer
from te_hal.quantization.quantizer_arguments import check_nominal, check_values
from te_hal.schema.errors import ArgumentError, StateError
from te_hal.schema.formats import E4M3, FLOATS

if TYPE_CHECKING:
    from te_hal.quantization.quantized_tensor import QuantizedTensor
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

    def make_empty(
        self,
        shape: tuple[int, ...],  # noqa: ARG002
        *,
        dtype: torch.dtype = torch.float32,  # noqa: ARG002
        device: torch.device | str | None = None,  # noqa: ARG002
        requires_grad: bool = False,  # noqa: ARG002
        pin_memory: bool = False,  # noqa: ARG002
    ) -> QuantizedTensor:
        """Refused, as :meth:`quantize_storage`.

        Raises:
            StateError: always.
        """
        self._refuse("make_empty")

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Nothing to record."""

    def _refuse(self, method: str) -> NoReturn:
        raise StateError(
            f"{type(self).__name__}.{method}",
            got="a quantizer without codes",
            accepted="operand(tensor), which gives a plain tensor",
            todo="use one of te.Float8Quantizer and its like for codes",
        )


class IdentityQuantizer(UnquantizedQuantizer):
    """Leaves tensors as they are, for roles of a CustomRecipe that stay in high precision.

    Called by itself it gives an IdentityTensor with values of its own.

    Args:
        dtype: round to this dtype first; None: do nothing.
        rowwise, columnwise: without effect, as in Transformer Engine.

    Raises:
        ArgumentError: a dtype that products do not take.
    """

    mode: Any = IdentityMode.IDENTITY

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        if dtype is not None and dtype not in FLOATS:
            accepted = ", ".join(map(str, (None, *FLOATS)))
            raise ArgumentError("IdentityQuantizer: dtype", got=repr(dtype), accepted=accepted, todo="correct it")
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.rounds_to = dtype

    def is_requantization_safe(self) -> bool:
        """Yes: it rounds one way, if at all."""
        return True

    def _check_usages(self) -> None:
        """Neither is needed: one buffer serves both."""

    def simulate(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, rounded where the quantizer rounds."""
        return tensor if self.rounds_to is None else tensor.to(self.rounds_to).to(tensor.dtype)

    def quantize_storage(  # type: ignore[override] # no codes
        self,
        tensor: torch.Tensor,
        *,
        rowwise: bool = True,  # noqa: ARG002
        columnwise: bool = False,  # noqa: ARG002
        out: Any = None,  # noqa: ANN401 - an IdentityStorage, which is checked
        kernels: CastKernels = OPS,  # noqa: ARG002
    ) -> IdentityStorage:
        """A copy of the values, in the quantizer's dtype; into ``out`` where given. No direction needs another one.

        Raises:
            ArgumentError: ``out`` is of another quantizer, or of another shape.
        """
        check_values("IdentityQuantizer", tensor.dtype)
        if out is None:
            return IdentityStorage(tensor.to(self.rounds_to or tensor.dtype, copy=True))
        if not isinstance(out, IdentityStorage) or out.shape != tuple(tensor.shape):
            raise ArgumentError(
                "IdentityQuantizer: out",
                got=f"{getattr(out, 'kind', type(out).__name__)!r} of shape {getattr(out, 'shape', None)}",
                accepted=f"what an IdentityQuantizer made, of shape {tuple(tensor.shape)}",
                todo="leave it out, or quantize with the quantizer that made it",
            )
        out.data.copy_(self.simulate(tensor))
        return out

    def make_empty(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """An IdentityTensor with uninitialised values; arguments as of :meth:`Quantizer.make_empty`."""
        check_nominal(type(self).__name__, dtype)
        data = torch.empty(shape, dtype=self.rounds_to or dtype, device=device, pin_memory=pin_memory)
        storage: Any = IdentityStorage(data)
        return wrap(storage, quantizer=self, requires_grad=requires_grad)


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
