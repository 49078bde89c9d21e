"""Element formats and scaling modes: the vocabulary shared by recipes, quantizers, ops and backends."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from te_hal.schema.errors import ArgumentError

#: Largest finite fp32 value: what a scale becomes when the exact quotient overflows (docs/numerics.md, S3).
FLOAT32_MAX = 3.4028234663852886e38

#: The largest number that fp32 rounds to 0.
FLOAT32_ZERO = 2.0**-150

#: Dtypes of unquantized operands.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class DType(enum.IntEnum):
    """Transformer Engine's dtype codes, accepted wherever an FP8 dtype is expected."""

    kByte = 0  # noqa: N815 - TE's spelling
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815

    @classmethod
    def cast(cls, value: object) -> DType:
        """The member with the integer value of ``value`` (any enum of the same numbering)."""
        return cls(int(value))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, eq=False)
class ElementFormat:
    """One narrow floating-point code. There is one object of each, so equality is identity, whose hash costs nothing.

    Attributes:
        name: as recipes spell it.
        dtype: torch's dtype of the codes; of E2M1, torch.uint8: a byte holds two (docs/numerics.md, NV1), and the
            4-bit dtype of torch is younger than what te_hal runs on.
        code: Transformer Engine's code.
        max: largest finite magnitude.
    """

    name: str
    dtype: torch.dtype
    code: DType
    max: float

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles give the one object of each format, so that identity can be asked for."""
        return _named, (self.name,)


def _named(name: str) -> ElementFormat:
    return FORMATS[name]


E4M3 = ElementFormat("E4M3", torch.float8_e4m3fn, DType.kFloat8E4M3, 448.0)
E5M2 = ElementFormat("E5M2", torch.float8_e5m2, DType.kFloat8E5M2, 57344.0)

E2M1 = ElementFormat("E2M1", torch.uint8, DType.kFloat4E2M1, 6.0)

#: Every format by name.
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1)}

#: Dtypes of 8-bit codes.
FP8_DTYPES = (E4M3.dtype, E5M2.dtype)

#: Dtypes that an operand may be quantized to.
CODE_DTYPES = tuple(fmt.dtype for fmt in FORMATS.values())

_BY_DTYPE_OR_CODE = {key: fmt for fmt in (E4M3, E5M2) for key in (fmt.dtype, fmt.code)}


def element_format(dtype: torch.dtype | DType | ElementFormat, where: str = "element_format") -> ElementFormat:
    """The 8-bit format that a torch dtype or a TE dtype code names; :func:`code_format` knows E2M1 as well.

    Raises:
        ArgumentError: anything but E4M3 and E5M2.
    """
    if isinstance(dtype, ElementFormat):
        return dtype
    found = _BY_DTYPE_OR_CODE.get(dtype) if isinstance(dtype, (torch.dtype, int)) else None
    if found is None:
        raise ArgumentError(
            where,
            got=f"dtype {dtype!r}",
            accepted="torch.float8_e4m3fn, torch.float8_e5m2 or their te.DType codes",
            todo="choose one of the two FP8 formats",
        )
    return found


def code_format(dtype: torch.dtype) -> ElementFormat:
    """The format of an op's flag ``dtype``, which has been checked: one of CODE_DTYPES."""
    return E2M1 if dtype is E2M1.dtype else _BY_DTYPE_OR_CODE[dtype]


class ScalingMode(str, enum.Enum):
    """How many elements share one scale. Backends answer per mode what they can do.

    The modes of NVFP4 differ in what is scaled: ``nvfp4_16x16`` has one scale per square, and the columnwise copy of
    ``nvfp4_hadamard`` holds transformed values (docs/numerics.md, NV6).
    """

    TENSOR = "tensor"
    BLOCK_1X128 = "block_1x128"
    BLOCK_128X128 = "block_128x128"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    NVFP4_16X16 = "nvfp4_16x16"
    NVFP4_HADAMARD = "nvfp4_hadamard"
    MTFP8_1X128 = "mtfp8_1x128"
    MTFP8_128X128 = "mtfp8_128x128"

    __hash__ = str.__hash__  # Enum's own hash is a Python call, and these stand in every memo key


class ColumnwiseOrder(str, enum.Enum):
    """Memory order of a columnwise copy of ``[..., K]`` data.

    ``TRANSPOSED``: stored as ``[K, ...]``. ``SAME``: stored like the rowwise copy.
    """

    TRANSPOSED = "transposed"
    SAME = "same"

    __hash__ = str.__hash__
