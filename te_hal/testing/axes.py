"""The axes of an op: what may differ between two of its cases, read from its schema, each value a short word."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.block_scales import order_of
from te_hal.schema.formats import E2M1, FORMATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.op import REQUIRED, FlagType
from te_hal.schema.storage_kind import StorageKind
from te_hal.testing.sizes import in_whole_blocks, is_shape, shapes_of
from te_hal.testing.values import patterns_of

if TYPE_CHECKING:
    from te_hal.schema.op import Flag, Operand, OpSchema

#: Torch's dtypes by the words of a case's id.
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": E2M1.dtype,
    "bool": torch.bool,
}
WORDS = {dtype: word for word, dtype in DTYPES.items()}

#: How operands lie in memory: dense and aligned; one element off; every second element; transposed; rows so far
#: apart that an index is beyond 2**31.
MEMORY = ("dense", "offset", "strided", "turned", "far")
#: How the kernel is called: twice, one after the other; from two threads at once; on a stream that is behind.
RUNS = ("twice", "threads", "streams")

#: Copies of a storage by the words of a case's id: rowwise, columnwise, order.
COPIES = {
    "row": (True, False, ColumnwiseOrder.TRANSPOSED),
    "column": (False, True, ColumnwiseOrder.TRANSPOSED),
    "both": (True, True, ColumnwiseOrder.TRANSPOSED),
    "both-same-order": (True, True, ColumnwiseOrder.SAME),
    "column-same-order": (False, True, ColumnwiseOrder.SAME),
}
#: Those that operands are tried with; the others are for a single case, by its id.
_TRIED = ("row", "column", "both", "both-same-order")

#: Numbers that flags take, the everyday one first. A flag that is not here keeps its default.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "epsilon": ("1e-05", "0.0", "4.0"),
    "amax_epsilon": ("0.0", "4.0"),
    "value_for_inf": ("3.4028234663852886e+38", "65504.0"),
    "fp8_max": ("448.0", "57344.0"),
    "fp8_maxima": ("448.0", "57344.0"),
    "margin": ("0", "3", "-2"),
    "rounding_seed": ("none", "1234567890123456789"),
    "scale": ("1.0", "0.125"),
    "limit": ("none", "0.75"),
    "alpha": ("none", "0.5"),
    "glu_linear_offset": ("none", "0.0"),
    "window": ("-1:-1", "0:0", "3:2", "5:-1"),
}
#: Operands that may be left out, but not in an everyday call.
_NEEDED = frozenset({("quantize", "scale")})
_NUMERIC = (
    FlagType.INT,
    FlagType.OPTIONAL_INT,
    FlagType.FLOAT,
    FlagType.FLOATS,
    FlagType.OPTIONAL_FLOAT,
    FlagType.WINDOW,
)

Axes = dict[str, tuple[str, ...]]


def axes_of(schema: OpSchema) -> Axes:
    """Name of each axis, and its values, the everyday one first."""
    axes: Axes = {"shape": shapes_of(schema), "values": patterns_of(schema)}
    for operand in schema.operands:
        words = _operand_words(operand)
        if (schema.name, operand.name) in _NEEDED:
            words = words[::-1]
        if len(words) > 1:
            axes[operand.name] = words
    for flag in schema.flags:
        words = _flag_words(flag)
        if len(words) > 1:
            axes[flag_axis(schema, flag.name)] = words
    axes["memory"] = MEMORY
    axes["run"] = RUNS
    return axes


def takes(schema: OpSchema, axis: str, word: str) -> bool:
    """Whether an axis may have a word: one of its values, or a shape, storage or number that is not among them."""
    axes = axes_of(schema)
    if axis not in axes or word in axes[axis]:
        return axis in axes
    if axis == "shape":
        return is_shape(schema, word)
    if "." in word and any(operand.name == axis and operand.formats for operand in schema.operands):
        return word in _every_storage()
    flag = next((f for f in schema.flags if flag_axis(schema, f.name) == axis and f.type in _NUMERIC), None)
    if flag is None or word == "none":
        return False
    try:
        flag_value(flag, word)
    except ValueError:
        return False
    return True


@functools.cache
def _every_storage() -> frozenset[str]:
    """Every word of a storage, those that no case is tried with included."""
    return frozenset(
        f"{format_}.{mode.value}.{copies}" for mode in ScalingMode for format_ in _formats_of(mode) for copies in COPIES
    )


def flag_word(flag: Flag, value: Any) -> str:  # noqa: ANN401 - any argument that a flag takes
    """The word of a flag's value; what :func:`flag_value` makes of it is the value again."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, torch.dtype):
        return WORDS[value]
    if flag.type is FlagType.WINDOW:
        return ":".join(map(str, value))
    if flag.type is FlagType.FLOATS:
        return str(float(value[0]))
    return str(getattr(value, "value", value))


def apart(axes: Axes) -> list[Axes]:
    """The axes of an op whose pairs are tried together; NVFP4, which few values go with, by itself."""
    if "a" in axes and "b" in axes:
        return _products_apart(axes)
    fp4 = tuple(word for word in axes.get("mode", ()) if word in NVFP4_MODES)
    if not fp4:
        return [axes]
    rest = {"mode": tuple(word for word in axes["mode"] if word not in fp4), "rounding_seed": ("none",)}
    rest["dtype"] = tuple(word for word in axes["dtype"] if word != WORDS[E2M1.dtype])
    alone = {"mode": fp4, "dtype": (WORDS[E2M1.dtype],), "columnwise_order": (ColumnwiseOrder.TRANSPOSED.value,)}
    alone |= dict.fromkeys(("scale", "amax"), ("none",))
    alone |= {flag: axes[flag][:1] for flag in ("amax_epsilon", "power_of_2") if flag in axes}
    alone["shape"] = tuple(shape for shape in axes["shape"] if in_whole_blocks(shape))
    return [{**axes, **{n: w for n, w in words.items() if n in axes}} for words in (rest, alone)]


def _products_apart(axes: Axes) -> list[Axes]:
    """Products without and with operands in NVFP4."""
    others = {n: tuple(word for word in axes[n] if not word.startswith(WORDS[E2M1.dtype])) for n in "ab"}
    fp4 = {n: tuple(word for word in axes[n] if word in WORDS.values() or word not in others[n]) for n in "ab"}
    shapes = axes["shape"]
    whole = tuple(shape for shape in shapes if all(in_whole_blocks(f"{size}x{size}") for size in shape.split("x")))
    return [{**axes, **others}, {**axes, **fp4, "shape": whole}]


def flag_axis(schema: OpSchema, flag: str) -> str:
    """The axis of a flag: its name, unless an operand has the same one (softmax's scale is no operand)."""
    return f"{flag}_flag" if any(operand.name == flag for operand in schema.operands) else flag


def _operand_words(operand: Operand) -> tuple[str, ...]:
    words = tuple(WORDS[dtype] for dtype in sorted(operand.dtypes, key=lambda dtype: dtype is not torch.bfloat16))
    if operand.formats:
        # A storage that is written has the format and copies that the flags ask for.
        words += ("given",) if operand.written else storage_words()
    return (("none", *words) if operand.optional else words) or ("given",)


def storage_words() -> tuple[str, ...]:
    """Storages as operands: every format and mode that go together, with the copies that are tried."""
    found = []
    for mode in ScalingMode:
        for format_ in _formats_of(mode):
            copies = _TRIED if format_ != "e5m2" else ("both",)
            kept = (word for word in copies if word == "row" or COPIES[word][2] is order_of(mode, COPIES[word][2]))
            found += [f"{format_}.{mode.value}.{word}" for word in kept]
    return tuple(found)


def _formats_of(mode: ScalingMode) -> tuple[str, ...]:
    return ("e2m1",) if mode in NVFP4_MODES else ("e4m3", "e5m2")


def storage_kind(word: str) -> StorageKind:
    """The kind that ``format.mode.copies`` names."""
    format_, mode, copies = word.split(".")
    rowwise, columnwise, order = COPIES[copies]
    return StorageKind.of(
        FORMATS[format_.upper()], ScalingMode(mode), rowwise=rowwise, columnwise=columnwise, order=order
    )


def _flag_words(flag: Flag) -> tuple[str, ...]:
    if flag.type is FlagType.BOOL:
        return ("true", "false") if flag.default is True else ("false", "true")
    if flag.type in _NUMERIC:
        return _NUMBERS.get(flag.name, ())
    words = tuple(
        WORDS[choice] if isinstance(choice, torch.dtype) else getattr(choice, "value", str(choice))
        for choice in flag.choices
    )
    return ("none", *words) if flag.type is FlagType.OPTIONAL_DTYPE else words


def flag_value(flag: Flag, word: str | None) -> object:  # noqa: PLR0911 - one per type
    """The argument that a word stands for; None: the flag's default, or what it takes where it has none."""
    if word is None:
        return flag.default if flag.default is not REQUIRED else flag_value(flag, _flag_words(flag)[0])
    if flag.type is FlagType.BOOL:
        return word == "true"
    if flag.type is FlagType.CHOICE:
        return next((c for c in flag.choices if getattr(c, "value", c) == word), word)
    if word == "none":
        return None
    if flag.type in (FlagType.DTYPE, FlagType.OPTIONAL_DTYPE):
        return DTYPES[word]
    if flag.type is FlagType.WINDOW:
        left, right = word.split(":")
        return int(left), int(right)
    return int(word) if flag.type in (FlagType.INT, FlagType.OPTIONAL_INT) else float(word)
