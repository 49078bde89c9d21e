"""Checks of a kernel library on a real device: what the kernels rely on, then the ops against cpu_reference.

Nothing here knows which device it is. The command `te-hal selftest` runs it and prints what goes into a report.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.ffi.binding import binding
from te_hal.ffi.selftest_fused import fused_cases, judge
from te_hal.ffi.selftest_nvfp4 import copy_tensors, nvfp4_cases
from te_hal.schema.block_scales import BLOCK_MODES, MTFP8_MODES, block_copy, order_of
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import E4M3, E5M2, ColumnwiseOrder, ScalingMode
from te_hal.schema.nvfp4_layout import NVFP4_MODES
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from te_hal.ffi.library import Library
    from te_hal.schema.backend import Backend

_ALL_PATTERNS = 2
_SMALLEST_NORMAL = 2.0**-126


class Check(NamedTuple):
    """One line of the report; ``skipped``: the backend lacks the op, so that nothing was checked."""

    name: str
    passed: bool
    detail: str
    skipped: bool = False


@dataclass(frozen=True)
class Selftest:
    """What is tested and what it is held against.

    Attributes:
        tested: the backend.
        reference: runs an op on cpu_reference, from its name, operands and flags.
        library: the library that the backend's kernels call.
        device: where to run; ``index`` given unless it is the host.
        stream: the current stream of that device.
    """

    tested: Backend
    reference: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    library: Library
    device: torch.device
    stream: int

    def checks(self) -> Iterator[Check]:
        """Every check in order; a kernel that fails is a failed check, one that is not there a skipped one."""
        yield self._device()
        for name, op, check in (
            ("division", "compute_scale", self._division),
            ("square root", "rmsnorm_fwd", self._square_root),
            ("atomic maximum", "amax", self._atomic_maximum),
        ):
            yield _run(name, check) if op in self.tested.kernels else _lacks(name, op)
        yield _run("FP8 encoder", self._fp8_encoder)
        cases = list(_cases())
        for op in dict.fromkeys(op for op, *_ in cases if op not in self.tested.kernels):
            yield _lacks(op, op)
        for op, operands, flags in (case for case in cases if case[0] in self.tested.kernels):
            parts = [repr(value.kind) for value in operands if isinstance(value, QuantizedStorage)]
            parts += [f"{name}={str(value).removeprefix('torch.')}" for name, value in flags.items()]
            label = ", ".join(parts)
            yield _run(f"{op}({label})" if label else op, lambda o=op, a=operands, f=flags: self._op(o, a, f))  # type: ignore[misc]

    def _device(self) -> Check:
        info = self.library.device_info(self.device.index or 0)
        detail = f"{info.name or 'unnamed'}, architecture {info.architecture}, {info.multiprocessors} multiprocessors, "
        detail += f"waves of {info.wave}, {info.shared_memory_per_block} bytes of shared memory a block"
        return Check("device", True, detail)

    def _division(self) -> tuple[bool, str]:
        """compute_scale is one division per element: it must be the IEEE quotient."""
        generator = torch.Generator().manual_seed(0)
        amax = torch.empty(1 << 20).uniform_(-80, 80, generator=generator).exp2()
        wrong = 0
        for fp8_max in (E4M3.max, E5M2.max):
            expected = torch.full_like(amax, fp8_max) / amax
            found = self.tested.kernels["compute_scale"](amax.to(self.device), fp8_max=fp8_max).cpu()
            wrong += int((found != expected).sum())
        return wrong == 0, f"{wrong} of {2 * amax.numel()} quotients are not correctly rounded"

    def _square_root(self) -> tuple[bool, str]:
        """Rmsnorm's rstd of rows whose mean square is exact in fp32 and no square."""
        generator = torch.Generator().manual_seed(0)
        pairs = torch.randint(1, 2048, (1 << 18, 2), generator=generator).float()
        weight = torch.ones(2)
        _, rstd = self.tested.kernels["rmsnorm_fwd"](pairs.to(self.device), weight.to(self.device), epsilon=0.0)
        mean_square = pairs.square().sum(-1) / 2
        stepwise = torch.ones(()) / mean_square.sqrt()
        off = (rstd.cpu().view(torch.int32) - mean_square.double().rsqrt().float().view(torch.int32)).abs()
        same = int((rstd.cpu() == stepwise).sum())
        largest = int(off.max())
        detail = f"1/sqrt at most {largest} units from the nearest; {same} of {rstd.numel()} equal two IEEE operations"
        return largest <= 1, detail

    def _atomic_maximum(self) -> tuple[bool, str]:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(1 << 22, generator=generator).to(self.device)
        repeats, wrong = 50, 0
        for index in torch.randint(0, values.numel(), (repeats,), generator=generator).tolist():
            values[index] = -1000.0 - index
            wrong += self.tested.kernels["amax"](values).item() != 1000.0 + index
            values[index] = 0.0
        return wrong == 0, f"{wrong} of {repeats} maxima of {values.numel()} values are wrong"

    def _fp8_encoder(self) -> tuple[bool, str]:
        """The device's instruction against the software encoder on every fp32 bit pattern; it stays chosen if equal."""
        lib, ffi = binding()
        mismatches = ffi.new("int64_t *")
        status = lib.api_select_fp8_encoder(self.library.api, _ALL_PATTERNS, mismatches, self.stream)
        if status == lib.TE_HAL_UNSUPPORTED:
            return True, "software; the library knows no instruction for this device"
        if status:
            raise self.library.error(status, "select_fp8_encoder")
        return mismatches[0] == 0, f"instruction; {mismatches[0]} of 2^32 bit patterns differ from the software encoder"

    def _op(self, op: str, operands: tuple[Any, ...], flags: dict[str, Any]) -> tuple[bool, str]:
        own = [_put(value, self.device) for value in operands]
        found = self.tested.kernels[op](*own, **flags)
        exact = SCHEMAS[op].contract.exact
        expected = self.reference(op, operands, flags)
        results = zip(_tensors((found, *own)), _tensors((expected, *operands)), strict=True)
        pairs = [(a.cpu(), b) for a, b in results]
        if exact:
            wrong = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)
            return wrong == 0, f"{wrong} of {sum(a.nbytes for a, _ in pairs)} bytes differ"
        if SCHEMAS[op].contract.codes_off is not None:
            return judge(SCHEMAS[op], pairs)
        worst, allowed = 0.0, 0.0
        for a, b in pairs[: len(_tensors((found,)))]:
            error = float((a.double() - b.double()).norm() / b.double().norm().clamp(min=_SMALLEST_NORMAL))
            # Both are within the bound of the true result.
            limit = 2 * SCHEMAS[op].contract.bound[a.dtype]
            if error / limit >= (worst / allowed if allowed else 0.0):
                worst, allowed = error, limit
        return worst <= allowed, f"{worst:.1e} from cpu_reference, where {allowed:.1e} is allowed"


def _lacks(name: str, op: str) -> Check:
    return Check(name, True, f"has no kernel for {op}", skipped=True)


def _run(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    try:
        passed, detail = check()
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, passed, detail)


def _put(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - whatever an op takes
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, QuantizedStorage):
        return value.with_tensors(tuple(None if t is None else t.to(device) for t in value.tensors()))
    if isinstance(value, tuple):
        return tuple(_put(item, device) for item in value)
    return value


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """Every tensor in results and operands, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.contiguous())
        elif isinstance(value, tuple):
            found += _tensors(value)
        elif isinstance(value, QuantizedStorage) and value.mode in NVFP4_MODES:
            for rowwise, there in ((True, value.kind.rowwise), (False, value.kind.columnwise)):
                found += copy_tensors(value, rowwise=rowwise) if there else []
        elif isinstance(value, QuantizedStorage) and value.mode is not ScalingMode.TENSOR:
            held = ((True, value.kind.rowwise), (False, value.kind.columnwise))
            for copy in (block_copy(value, rowwise=rowwise) for rowwise, there in held if there):
                # Without the padding of the scales, which no op writes.
                found += [copy.codes, copy.grid.flatten().clone(memory_format=torch.contiguous_format)]
        elif isinstance(value, QuantizedStorage):
            found += [t for t in value.tensors() if t is not None]
    return found


def _cases() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Op, operands on the CPU, and flags: every family, sizes even and odd, and values of every kind."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 0.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return (values * torch.empty(shape).uniform_(-spread, spread, generator=generator).exp()).to(dtype)

    special = draw(130, 264, dtype=torch.float32, spread=8.0)
    special.view(-1)[::97] = math.nan
    special.view(-1)[5::101] = -math.inf
    for x in (special, draw(136, 264), draw(13, 37, dtype=torch.float16)):
        for target in (E4M3, E5M2):
            yield "quantize", (x, torch.tensor([3.7])), {"dtype": target.dtype, "columnwise": True}
        yield "amax", (x,), {}
        yield from _block_cases(x, generator)
    history = draw(16, 40, dtype=torch.float32, spread=8.0).abs()
    for algorithm in ("max", "most_recent"):
        flags = {"fp8_max": E4M3.max, "amax_compute_algo": algorithm}
        yield "update_delayed_scale", (history.clone(), torch.ones(40)), flags
    x, weight, bias = draw(600, 2048), draw(2048), draw(2048)
    yield "layernorm_fwd", (x, weight, bias), {}
    yield "rmsnorm_fwd", (x, weight), {"out_dtype": torch.float32}
    rstd = (x.float().square().mean(-1) + 1e-5).rsqrt()
    yield "rmsnorm_bwd", (draw(600, 2048), x, rstd, weight), {}
    for causal in ("none", "top_left", "bottom_right"):
        yield "softmax_fwd", (draw(2, 3, 72, 100),), {"causal": causal, "scale": 0.3}
    for activation in ("gelu", "swiglu"):
        yield "activation_fwd", (draw(72, 264),), {"activation": activation}
    yield from fused_cases(draw)
    yield from nvfp4_cases(draw)
    for layout, shapes in _PRODUCTS.items():
        for dtype in (torch.bfloat16, torch.float32):
            a, b = (draw(*shape, dtype=dtype) for shape in shapes)
            yield "gemm", (a, b), {"layout": layout, "out_dtype": dtype}
        yield "gemm", tuple(_quantized(draw(*shape)) for shape in shapes), {"layout": layout}


def _block_cases(x: torch.Tensor, generator: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Casts of ``x`` with a scale per block, and the decoding and the products of other values in blocks."""
    for target, mode in itertools.product((E4M3, E5M2), _BLOCKS):
        order = order_of(mode, ColumnwiseOrder.TRANSPOSED).value
        flags = {"dtype": target.dtype, "mode": mode.value, "columnwise": True, "columnwise_order": order}
        yield "quantize", (x,), flags
    if x.dtype == torch.bfloat16:
        for mode in _BLOCKS:
            yield "dequantize", (_in_blocks(x, mode, generator),), {}
        for (layout, shapes), modes in itertools.product(_PRODUCTS.items(), _PAIRED):
            drawn = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
            given = (_in_blocks(values, mode, generator) for values, mode in zip(drawn, modes, strict=True))
            yield "gemm", tuple(given), {"layout": layout}


_PRODUCTS = {
    "fprop": ((136, 264), (72, 264)),
    "dgrad": ((136, 72), (72, 264)),
    "wgrad": ((136, 72), (136, 264)),
}


#: Modes of blocks with a scale each and none above them.
_BLOCKS = tuple(sorted(BLOCK_MODES | MTFP8_MODES))
_PAIRED = (
    (ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_1X128),
    (ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128),
    (ScalingMode.MXFP8, ScalingMode.MXFP8),
    (ScalingMode.MTFP8_1X128, ScalingMode.MTFP8_128X128),
)


def _in_blocks(values: torch.Tensor, mode: ScalingMode, generator: torch.Generator) -> QuantizedStorage:
    """A storage with both copies, each of the same codes and of factors of its own."""
    order = order_of(mode, ColumnwiseOrder.TRANSPOSED)
    kind = StorageKind.of(E4M3, mode, rowwise=True, columnwise=True, order=order)
    storage = QuantizedStorage.empty(kind, tuple(values.shape), values.dtype, "cpu")
    codes = _codes(values)
    turned = codes.t() if order is ColumnwiseOrder.TRANSPOSED else codes
    for target, source in ((storage.rowwise_data, codes), (storage.columnwise_data, turned)):
        if target is not None:
            target.copy_(source)
    for factors in (storage.rowwise_scale_inv, storage.columnwise_scale_inv):
        if factors is not None and mode is ScalingMode.MXFP8:
            factors.random_(120, 130, generator=generator)
        elif factors is not None:
            factors.uniform_(0.1, 2.0, generator=generator)
    return storage


def _codes(values: torch.Tensor) -> torch.Tensor:
    """As torch rounds them; they are given, so whichever way it rounds will do."""
    return values.float().clamp(-E4M3.max, E4M3.max).to(E4M3.dtype).view(torch.uint8)


def _quantized(values: torch.Tensor) -> QuantizedStorage:
    """A rowwise storage with one scale."""
    return QuantizedStorage(
        format=E4M3,
        mode=ScalingMode.TENSOR,
        shape=tuple(values.shape),
        dtype=values.dtype,
        rowwise_data=_codes(values),
        rowwise_scale_inv=torch.tensor([0.37]),
    )
