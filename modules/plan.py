"""LinearPlan: what forward and backward of a linear layer run, decided once per recipe, dtypes and device.

Capability is asked and kernels are bound when the plan is made; running it asks nobody. A plan belongs to the
selection it was made under: ``memo`` is dispatch's memo at that time, and a module drops plans whose memo is not
the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import backend_for, current_memo, resolve
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode
    from te_hal.schema.support import Kind

Kernel = Callable[..., Any]


class Copies(NamedTuple):
    """Which copies of a quantized operand."""

    rowwise: bool
    columnwise: bool


class Layouts(NamedTuple):
    """The copies of each operand, made and kept; see :class:`LinearPlan`."""

    input_made: Copies
    weight_made: Copies
    input_kept: Copies
    weight_kept: Copies
    grad_made: Copies


class Formats(NamedTuple):
    """Formats of a linear layer's quantized operands, and their scaling mode."""

    input: ElementFormat
    weight: ElementFormat
    grad_output: ElementFormat
    mode: ScalingMode


class Casts(NamedTuple):
    """The bound kernels that a quantizer calls, under the names of te_hal.ops."""

    quantize: Kernel
    amax: Kernel
    compute_scale: Kernel


class PlanKey(NamedTuple):
    """Everything a plan depends on, the selection aside."""

    formats: Formats | None
    delayed: bool
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    output_dtype: torch.dtype
    main_grad_dtype: torch.dtype | None
    device: torch.device
    dgrad: bool
    wgrad: bool
    input_is_quantized: bool
    keeps_original_input: bool


@dataclass(frozen=True)
class LinearPlan:
    """Bound kernels and copies of one linear layer.

    Attributes:
        memo: dispatch's memo when the plan was made.
        backend: name of the backend whose gemm runs.
        order: memory order of columnwise copies.
        copies: ``input_made``, ``weight_made``: made in the forward (what fprop and the backward read);
            ``input_kept``, ``weight_kept``: what the backward reads, none where no gradient asks for them;
            ``grad_made``: copies of grad_output.
        fprop, dgrad, wgrad: gemm kernels. wgrad_into: by ``accumulate``, where main_grad takes the result.
        cast_input, cast_weight, cast_grad: kernels for the quantizers; None without FP8.
    """

    memo: object
    backend: str
    order: ColumnwiseOrder
    copies: Layouts
    fprop: Kernel
    dgrad: Kernel | None
    wgrad: Kernel | None
    wgrad_into: dict[bool, Kernel]
    cast_input: Casts | None
    cast_weight: Casts | None
    cast_grad: Casts | None


def make_plan(key: PlanKey) -> LinearPlan:
    """Ask for every kernel that the layer will run.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no to one of them.
        BackendUnavailableError: no backend for the device.
    """
    memo = current_memo()
    backend = backend_for(key.device, "gemm")
    copies = _layouts(key, backend.gemm_copies)
    gemms = _Gemms(key, copies, backend.columnwise_order)
    casts = _Casts(key, copies, backend.columnwise_order)
    return LinearPlan(
        memo=memo,
        backend=backend.name,
        order=backend.columnwise_order,
        copies=copies,
        fprop=gemms.fprop(),
        dgrad=gemms.dgrad() if key.dgrad else None,
        wgrad=gemms.wgrad() if key.wgrad and key.main_grad_dtype is None else None,
        wgrad_into=gemms.wgrad_into() if key.wgrad and key.main_grad_dtype is not None else {},
        cast_input=casts.input(),
        cast_weight=casts.weight(),
        cast_grad=casts.grad_output(),
    )


def _layouts(key: PlanKey, gemm_copies: Callable[..., Any]) -> Layouts:
    """Which copies each gemm reads, as the backend answers per layout."""
    if key.formats is None:
        return Layouts(*[Copies(rowwise=False, columnwise=False)] * len(Layouts._fields))
    input_format, _, grad_format, mode = key.formats
    fprop = gemm_copies("fprop", input_format, mode)
    dgrad = gemm_copies("dgrad", grad_format, mode)
    wgrad = gemm_copies("wgrad", grad_format, mode)
    keeps_input = key.wgrad and not key.keeps_original_input
    for_wgrad, for_dgrad = [wgrad.b] if keeps_input else [], [dgrad.b] if key.dgrad else []
    grad = ([dgrad.a] if key.dgrad else []) + ([wgrad.a] if key.wgrad else [])
    return Layouts(
        input_made=_union([fprop.a, *for_wgrad]),
        weight_made=_union([fprop.b, *for_dgrad]),
        input_kept=_union(for_wgrad),
        weight_kept=_union(for_dgrad),
        grad_made=_union(grad),
    )


def _union(names: list[str]) -> Copies:
    return Copies(rowwise="rowwise" in names, columnwise="columnwise" in names)


class _Gemms:
    """Resolves the gemm kernels of one plan."""

    def __init__(self, key: PlanKey, copies: Layouts, order: ColumnwiseOrder) -> None:
        self.key, self.copies, self.order = key, copies, order

    def fprop(self) -> Kernel:
        kinds = {"a": self._kind("input", self.copies.input_made), "b": self._kind("weight", self.copies.weight_made)}
        return self._resolve("fprop", kinds, self.key.output_dtype, bias=self.key.bias_dtype)

    def dgrad(self) -> Kernel:
        kinds = {
            "a": self._kind("grad_output", self.copies.grad_made),
            "b": self._kind("weight", self.copies.weight_kept),
        }
        return self._resolve("dgrad", kinds, self.key.dtype)

    def wgrad(self) -> Kernel:
        return self._resolve("wgrad", self._wgrad_kinds(), self.key.dtype)

    def wgrad_into(self) -> dict[bool, Kernel]:
        kinds, dtype = self._wgrad_kinds(), self.key.main_grad_dtype
        return {
            accumulate: self._resolve("wgrad", kinds, dtype, out=dtype, accumulate=accumulate)
            for accumulate in (False, True)
        }

    def _wgrad_kinds(self) -> dict[str, Kind]:
        kept = self.copies.input_made if self.key.keeps_original_input else self.copies.input_kept
        return {"a": self._kind("grad_output", self.copies.grad_made), "b": self._kind("input", kept)}

    def _kind(self, role: str, copies: Copies) -> Kind:
        if self.key.formats is None:
            return self.key.dtype
        fmt: ElementFormat = getattr(self.key.formats, role)
        return StorageKind.of(
            fmt, self.key.formats.mode, rowwise=copies.rowwise, columnwise=copies.columnwise, order=self.order
        )

    def _resolve(
        self,
        layout: str,
        kinds: dict[str, Kind],
        out_dtype: torch.dtype | None,
        *,
        bias: torch.dtype | None = None,
        out: torch.dtype | None = None,
        accumulate: bool = False,
    ) -> Kernel:
        flags = {"layout": layout, "accumulate": accumulate, "out_dtype": out_dtype}
        call = Call("gemm", self.key.device, {**kinds, "bias": bias, "out": out}, flags)
        return resolve(call).kernel


class _Casts:
    """Resolves the cast kernels of one plan; None without FP8, or where a role is not quantized."""

    def __init__(self, key: PlanKey, copies: Layouts, order: ColumnwiseOrder) -> None:
        self.key, self.copies, self.order = key, copies, order

    def input(self) -> Casts | None:
        if self.key.formats is None or self.key.input_is_quantized:
            return None
        return self._bind(self.key.formats.input, self.key.formats.mode, self.copies.input_made)

    def weight(self) -> Casts | None:
        if self.key.formats is None:
            return None
        return self._bind(self.key.formats.weight, self.key.formats.mode, self.copies.weight_made)

    def grad_output(self) -> Casts | None:
        if self.key.formats is None or not (self.key.dgrad or self.key.wgrad):
            return None
        return self._bind(self.key.formats.grad_output, self.key.formats.mode, self.copies.grad_made)

    def _bind(self, fmt: ElementFormat, mode: ScalingMode, made: Copies) -> Casts:
        dtype, device = self.key.dtype, self.key.device
        amax = torch.float32 if self.key.delayed else None
        kinds: dict[str, Kind] = {"input": dtype, "scale": torch.float32, "amax": amax, "out": None}
        flags = {
            "dtype": fmt.dtype,
            "mode": mode,
            "rowwise": made.rowwise,
            "columnwise": made.columnwise,
            "columnwise_order": self.order,
        }
        return Casts(
            resolve(Call("quantize", device, kinds, flags)).kernel,
            resolve(Call("amax", device, {"input": dtype, "out": None}, {})).kernel,
            resolve(Call("compute_scale", device, {"amax": torch.float32}, {})).kernel,
        )
