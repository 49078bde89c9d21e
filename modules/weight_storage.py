"""What a weight that lives in FP8 holds: the copies that gemms on its device read, by a quantizer of any kind."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import backend_for
from te_hal.quantization import HybridQuantizer, IdentityQuantizer
from te_hal.quantization.copies import with_copies
from te_hal.quantization.hybrid_quantizer import HybridCasts
from te_hal.quantization.hybrid_storage import HybridStorage
from te_hal.quantization.identity_storage import IdentityStorage
from te_hal.quantization.linear_calls import NO_COPIES, ROWWISE, Copies, HybridCopies, linear_copies
from te_hal.quantization.unquantized import PythonQuantizer
from te_hal.schema.block_scales import order_of
from te_hal.schema.errors import StateError, UnsupportedError
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization import QuantizedTensor, Quantizer
    from te_hal.quantization.hybrid_storage import Part
    from te_hal.quantization.operand_formats import Formats, HybridFormat, OperandFormat

    Held = QuantizedStorage | HybridStorage | IdentityStorage


def refuse_python(where: str, quantizer: Quantizer) -> None:
    """Refuse a user's object that only quantizes and dequantizes.

    Raises:
        UnsupportedError: names its class.
    """
    if isinstance(quantizer, PythonQuantizer):
        raise UnsupportedError(
            where,
            got=f"a factory that quantizes it by a {type(quantizer.made).__name__}, a plain Python quantizer",
            accepted="a te.Quantizer: what the other one gives is no tensor that could be a parameter",
            todo="return a te.Quantizer for weights, or make the model outside of quantized_model_init",
        )


def copies_on(quantizer: Quantizer, formats: Formats, device: torch.device) -> Copies | HybridCopies:
    """The copies of a weight on a device; the quantizer lays out those in columns as the backend there reads them.

    Args:
        quantizer: of the weight, changed in place.
        formats: of the operands of its product.
        device: where it is; on the meta device, where no backend is, there is a copy in rows alone.
    """
    if device.type == "meta":
        plain = HybridCopies(_one(quantizer, rowwise=True), _one(quantizer, rowwise=False))
        return plain if isinstance(quantizer, HybridQuantizer) else ROWWISE
    backend, backward = backend_for(device, "gemm"), torch.is_grad_enabled()
    for each in _parts(quantizer):
        each.columnwise_order = order_of(each.mode, backend.columnwise_order)
    read = linear_copies(backend.gemm_copies, formats, dgrad=backward, wgrad=backward)
    of_parts = read.hybrid("weight")
    return Copies(rowwise=True, columnwise=read.weight_made.columnwise) if of_parts is None else of_parts


def _parts(quantizer: Quantizer) -> tuple[Quantizer, ...]:
    if isinstance(quantizer, HybridQuantizer):
        return quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
    return (quantizer,)


def _one(quantizer: Quantizer, *, rowwise: bool) -> Copies:
    if not isinstance(quantizer, HybridQuantizer):
        return ROWWISE
    child = _parts(quantizer)[0 if rowwise else 1]
    return Copies(rowwise=rowwise, columnwise=not rowwise) if child.quantizes else NO_COPIES


def stored(quantizer: Quantizer, plain: torch.Tensor, copies: Copies | HybridCopies) -> Held:
    """A plain weight as it is held from now on; one on the meta device has no values then either."""
    if plain.is_meta:
        return empty(quantizer, tuple(plain.shape), plain.dtype, plain.device, copies)
    if isinstance(quantizer, HybridQuantizer):
        wanted: Any = tuple(copies)
        return quantizer.operand(plain, rowwise=True, columnwise=True, kernels=HybridCasts(copies=wanted))
    return quantizer.quantize_storage(plain, rowwise=True, columnwise=copies.columnwise is True)


def empty(
    quantizer: Quantizer,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    copies: Copies | HybridCopies,
) -> Held:
    """The same without values."""
    if isinstance(copies, Copies):
        return _empty_part(quantizer, shape, dtype, device, copies)
    parts: list[Part | None] = []
    for child, made in zip(_parts(quantizer), copies, strict=True):
        part = None if made is None else _empty_part(child, shape, dtype, device, made)
        parts.append(part.data if isinstance(part, IdentityStorage) else part)
    return HybridStorage(parts[0], parts[1], shape=shape, dtype=dtype)


def _empty_part(
    quantizer: Quantizer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, copies: Copies
) -> QuantizedStorage | IdentityStorage:
    if not quantizer.quantizes:
        return IdentityStorage(torch.empty(shape, dtype=getattr(quantizer, "rounds_to", None) or dtype, device=device))
    kind = StorageKind.of(
        quantizer.format,
        quantizer.mode,
        rowwise=copies.rowwise,
        columnwise=copies.columnwise,
        order=quantizer.columnwise_order,
    )
    return QuantizedStorage.empty(kind, shape, dtype, device)


def fills(quantizer: Quantizer, storage: Held) -> bool:
    """Whether a quantizer makes what a weight holds, so that it can write it anew."""
    if isinstance(storage, IdentityStorage):
        return isinstance(quantizer, IdentityQuantizer)
    if isinstance(storage, HybridStorage):
        return isinstance(quantizer, HybridQuantizer) and all(
            part is None or (_fills(child, part) if isinstance(part, QuantizedStorage) else not child.quantizes)
            for child, part in zip(_parts(quantizer), (storage.rowwise, storage.columnwise), strict=True)
        )
    return _fills(quantizer, storage)


def _fills(quantizer: Quantizer, storage: QuantizedStorage) -> bool:
    return quantizer.quantizes and quantizer.format is storage.format and quantizer.mode is storage.mode


def same_codes(one: Held, other: Held) -> bool:
    """Whether one's codes were copied as they are, whichever copies there are."""
    if isinstance(one, QuantizedStorage) and isinstance(other, QuantizedStorage):
        return one.format is other.format and one.mode is other.mode
    return one.kind is other.kind


def operand_of(label: str, weight: QuantizedTensor, plan: LinearPlan) -> Operand:
    """The copies that a plan's gemms read; one that is missing is rearranged from the other for this call.

    Raises:
        StateError: the plan is for weights of another format or other blocks.
        UnsupportedError: a copy is missing whose codes are not those of the other.
    """
    held: Any = weight.quantized_storage
    formats, order = plan.key.formats, plan.order
    wanted, hybrid = (None, None) if formats is None else (formats.weight, formats.hybrid("weight"))
    if isinstance(held, IdentityStorage) and wanted is None and hybrid is None:
        return held.data
    if isinstance(held, HybridStorage) and hybrid is not None and _fits(held, hybrid):
        read = held.read_by(plan.copies.hybrid("weight") or HybridCopies(None, None), order)
        if read is None:
            raise _missing(label, held)
        return read
    if not isinstance(held, QuantizedStorage) or wanted is None or not _is(held, wanted):
        raise StateError(
            f"{label}: weight",
            got=f"{held.kind!r}, as it was quantized",
            accepted=f"{hybrid or wanted or 'a plain one'}, as the recipe in force has weights",
            todo="use the recipe that the model was made under",
        )
    made = plan.copies.weight_made
    storage = with_copies(held, rowwise=made.rowwise, columnwise=made.columnwise, order=order)
    return storage.keep(rowwise=made.rowwise, columnwise=made.columnwise)


def _fits(held: HybridStorage, hybrid: HybridFormat) -> bool:
    pairs = itertools.zip_longest((held.rowwise, held.columnwise), (hybrid.rowwise, hybrid.columnwise))
    return all(part is None or _is(part, of) for part, of in pairs)


def _is(part: Part, of: OperandFormat | None) -> bool:
    if isinstance(part, torch.Tensor):
        return of is None
    return of is not None and part.format is of.format and part.mode is of.mode


def _missing(label: str, held: HybridStorage) -> UnsupportedError:
    has = [name for name in ("rowwise", "columnwise") if getattr(held, name) is not None]
    return UnsupportedError(
        f"{label}: weight",
        got=f"{held.kind!r} with its {' and '.join(has)} part alone",
        accepted="both parts where gradients are asked for: each is cast from the unquantized tensor",
        todo="make the model, or quantize the weight again, where gradients are enabled",
    )
