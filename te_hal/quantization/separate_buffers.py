"""SeparateBuffers: what a tensor without memory of its own answers where torch would go to memory past any dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from te_hal.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.schema.storage import QuantizedStorage

_VALUES = "call it on dequantize()"
_WRITES = "write it as operations of torch, or dequantize(), change the values and quantize_() them back"
_ADDRESS = "take the address of a buffer in quantized_storage.tensors(), or of dequantize()"


class SeparateBuffers:
    """Mixed into QuantizedTensor, whose codes and scales are tensors of their own.

    torch's methods that read or write memory without asking the dispatcher would read address 0. Those that mean the
    buffers go to them; the others are refused. What reaches memory below these methods (``torch.utils.dlpack``) is
    refused by torch: see :func:`forbid_address`.
    """

    quantized_storage: QuantizedStorage

    def share_memory_(self) -> SeparateBuffers:
        """Move codes and scales into shared memory, in place; processes forked or sent this tensor write to the same.

        Views and other holders of the buffers move along.
        """
        for buffer in self._present():
            buffer.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Whether all codes and scales are in shared memory."""
        return all(buffer.is_shared() for buffer in self._present())  # type: ignore[no-untyped-call]

    def _present(self) -> list[torch.Tensor]:
        return [buffer for buffer in self.quantized_storage.tensors() if buffer is not None]

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage of the plain tensor's size in bytes, on the device meta: it has a size and no bytes."""
        nbytes = self.nbytes  # type: ignore[attr-defined] # of the tensor that this is mixed into
        return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]

    def _typed_storage(self) -> torch.TypedStorage:
        dtype = self.dtype  # type: ignore[attr-defined] # as above
        storage = self.untyped_storage()
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _refusing(name: str, todo: str) -> Callable[..., NoReturn]:
    def refuse(self: SeparateBuffers, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - whatever the method takes
        raise UnsupportedError(
            f"{type(self).__name__}.{name}",
            got="a quantized tensor, whose codes and scales are buffers of their own",
            accepted="a tensor with its values in its own memory",
            todo=todo,
        )

    refuse.__name__, refuse.__doc__ = name, f"Refused.\n\nRaises:\n    UnsupportedError: always; {todo}."
    return refuse


#: Methods of torch.Tensor that are refused, and what to do instead.
REFUSED = {
    "__dlpack__": "export dequantize(), or the buffers in quantized_storage.tensors()",
    "__array__": _VALUES,
    "numpy": _VALUES,
    "tolist": _VALUES,
    "pin_memory": "pin the buffers in quantized_storage.tensors(), or dequantize()",
    "storage": _ADDRESS,
    "data_ptr": _ADDRESS,
    "const_data_ptr": _ADDRESS,
    "apply_": _WRITES,
    "map_": _WRITES,
    "map2_": _WRITES,
}

for _name, _todo in REFUSED.items():
    setattr(SeparateBuffers, _name, _refusing(_name, _todo))


def forbid_address(tensor: torch.Tensor) -> None:
    """Have torch raise where anything below Python asks for the address of a tensor that has no memory."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)  # noqa: SLF001 - torch's only way
