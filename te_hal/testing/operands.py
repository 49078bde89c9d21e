"""The arguments of a case: what the schema asks for, filled with the case's values, dense, on the CPU."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.formats import ScalingMode, code_format
from te_hal.schema.op import FlagType
from te_hal.schema.storage import QuantizedStorage
from te_hal.schema.storage_kind import StorageKind
from te_hal.testing import axes
from te_hal.testing.codes import fill_storage
from te_hal.testing.sizes import operand_shapes
from te_hal.testing.values import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from te_hal.schema.op import Operand, OpSchema

    Words = Mapping[str, str]
    Known = dict[str, Any]

_CPU = torch.device("cpu")
#: Operands that the case's values go into; the others hold everyday ones.
_HARD = frozenset({"input", "grad_output", "a", "amax_history", "amax_histories", "reduced_amax", "reduced_amaxes"})
#: Rows of the amax histories behind the first, of an op that takes several.
_OTHER_GROUPS = ((16, 3), (2, 40))
_POISON = 0xFF
#: Factors that keep ties ties, and that bring extreme values to where the format has its edges.
_SCALES = {"ties": 8.0, "maximum": 1.0, "huge": 2.0**-115, "tiny": 2.0**118, "subnormals": 2.0**127}


def arguments_of(schema: OpSchema, words: Words, device: torch.device = _CPU) -> dict[str, Any]:
    """Every argument by name.

    Args:
        schema: the op.
        words: axis to value.
        device: the CPU; or meta, for the same arguments without data.

    Raises:
        ArgumentError: a combination of copies that no storage has.
    """
    flags = {f.name: axes.flag_value(f, words.get(axes.flag_axis(schema, f.name))) for f in schema.flags}
    shapes = operand_shapes(schema, words["shape"], flags.get(schema.variant or ""))
    known: Known = {}
    for operand in schema.operands:
        word = words.get(operand.name, "given")
        make = _many if operand.many else _one
        known[operand.name] = (
            None
            if word == "none"
            else make(schema, operand, word, shapes[operand.name], words, {**known, **flags}, device)
        )
    for flag in schema.flags:
        if flag.type is FlagType.FLOATS:
            flags[flag.name] = (flags[flag.name],) * (1 + len(_OTHER_GROUPS))
    return {**known, **flags}


def _many(
    schema: OpSchema,
    operand: Operand,
    word: str,
    shape: tuple[int, ...],
    words: Words,
    known: Known,
    device: torch.device,
) -> list[Any]:
    others = [rest if len(shape) == len(rest) else rest[-len(shape) :] for rest in _OTHER_GROUPS]
    return [_one(schema, operand, word, each, words, known, device) for each in (shape, *others)]


def _one(
    schema: OpSchema,
    operand: Operand,
    word: str,
    shape: tuple[int, ...],
    words: Words,
    known: Known,
    device: torch.device,
) -> Any:  # noqa: ANN401 - a tensor or a storage
    if operand.formats and operand.written:
        return _storage_to_fill(known, shape, device)
    if "." in word:
        return _storage(word, shape, words, operand.name, device)
    dtype = axes.DTYPES.get(word, operand.dtypes[0])
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{schema.name}.{operand.name}.{shape}".encode()))
    special = _SPECIAL.get((schema.name, operand.name)) or _SPECIAL.get(("", operand.name))
    if special is not None:
        return special(shape, dtype, words, known, generator)
    pattern = words["values"] if operand.name in _HARD else "normal"
    if operand.written:
        return _to_fill(shape, dtype, known, generator)
    return fill(pattern, shape, dtype, generator)


def _to_fill(shape: tuple[int, ...], dtype: torch.dtype, known: Known, generator: torch.Generator) -> torch.Tensor:
    """Values that are added to, or a pattern that must not show in the result."""
    if known.get("accumulate"):
        return fill("normal", shape, dtype, generator)
    poisoned = torch.empty(shape, dtype=dtype)
    poisoned.view(-1).view(torch.uint8).fill_(_POISON)
    return poisoned


def _storage_to_fill(known: Known, shape: tuple[int, ...], device: torch.device) -> QuantizedStorage:
    mode = ScalingMode(known.get("mode", ScalingMode.TENSOR))
    kind = StorageKind.of(
        code_format(known["dtype"]),
        mode,
        rowwise=known["rowwise"],
        columnwise=known["columnwise"],
        order=known["columnwise_order"],
    )
    storage = QuantizedStorage.empty(kind, shape, known["input"].dtype, device)
    for tensor in storage.tensors() if device.type != "meta" else ():
        if tensor is not None:
            tensor.view(-1).view(torch.uint8).fill_(_POISON)
    return storage


def _storage(word: str, shape: tuple[int, ...], words: Words, name: str, device: torch.device) -> QuantizedStorage:
    storage = QuantizedStorage.empty(axes.storage_kind(word), shape, torch.bfloat16, device)
    if device.type != "meta":
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{word}.{shape}".encode()))
        fill_storage(storage, words["values"], generator)
    return storage


def _scale(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del known, generator
    return torch.full(shape, _SCALES.get(words["values"], 0.7), dtype=dtype)


def _running_amax(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del known, generator
    return torch.full(shape, float("nan") if words["values"] == "nan" else 0.5, dtype=dtype)


def _magnitudes(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del known
    return fill(words["values"], shape, dtype, generator).abs()


def _scales_in_use(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del words, known
    return fill("normal", shape, dtype, generator).abs() + 1


def _mean(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del words, generator
    return known["input"].double().mean(-1).view(shape).to(dtype)  # type: ignore[no-any-return]


def _rstd(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del words, generator
    x = known["input"].double()
    centred = x - x.mean(-1, keepdim=True) if "mean" in known else x
    return (centred.square().mean(-1) + 1e-5).rsqrt().view(shape).to(dtype)  # type: ignore[no-any-return]


def _probabilities(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    del words, known
    return torch.randn(shape, generator=generator).double().softmax(-1).to(dtype)


def _mask(
    shape: tuple[int, ...], dtype: torch.dtype, words: Words, known: Known, generator: torch.Generator
) -> torch.Tensor:
    """A third of the keys hidden, and all of them in the first row."""
    del words, known
    mask = torch.rand(shape, generator=generator) < 1 / 3
    if mask.numel():
        mask[0] = True
    return mask.to(dtype)


_SPECIAL: dict[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("", "scale"): _scale,
    ("", "amax"): _running_amax,
    ("amax", "out"): _running_amax,
    ("compute_scale", "amax"): _magnitudes,
    ("", "amax_history"): _magnitudes,
    ("", "amax_histories"): _magnitudes,
    ("", "reduced_amax"): _magnitudes,
    ("", "reduced_amaxes"): _magnitudes,
    ("update_delayed_scale", "scale"): _scales_in_use,
    ("", "scales"): _scales_in_use,
    ("", "mean"): _mean,
    ("", "rstd"): _rstd,
    ("softmax_bwd", "output"): _probabilities,
    ("", "mask"): _mask,
}
