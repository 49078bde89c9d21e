"""Element formats and scaling modes: the vocabulary shared by recipes, quantizers, ops and backends."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from te_hal.schema.errors import ArgumentError

#: Largest finite fp32 value: what a scale becomes when the exact quotient overflows (docs/numerics.md, S3).
FLOAT32_MAX = 3.4028234663852886e38

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
    """One 8-bit floating-point code. There is one object of each, so equality is identity, whose hash costs nothing.

    Attributes:
        name: as recipes spell it.
        dtype: torch's dtype of the codes.
        code: Transformer Engine's code.
        max: largest finite magnitude.
    """

    name: str
    dtype: torch.dtype
    code: DType
    max: float

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles give the one object of each format, so that identity can be asked for."""
        return element_format, (self.dtype,)


E4M3 = ElementFormat("E4M3", torch.float8_e4m3fn, DType.kFloat8E4M3, 448.0)
E5M2 = ElementFormat("E5M2", torch.float8_e5m2, DType.kFloat8E5M2, 57344.0)

#: Every format by name.
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

#: Dtypes that an operand may be quantized to.
FP8_DTYPES = tuple(fmt.dtype for fmt in FORMATS.values())

_BY_DTYPE_OR_CODE = {key: fmt for fmt in FORMATS.values() for key in (fmt.dtype, fmt.code)}


def element_format(dtype: torch.dtype | DType | ElementFormat, where: str = "element_format") -> ElementFormat:
    """The element format that a torch dtype or a TE dtype code names.

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


class ScalingMode(str, enum.Enum):
    """How many elements share one scale. Backends answer per mode what they can do."""

    TENSOR = "tensor"
    BLOCK_1X128 = "block_1x128"
    BLOCK_128X128 = "block_128x128"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
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
