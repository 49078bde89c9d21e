"""LinearPlan: what forward and backward of a linear layer run, decided once per recipe, dtypes and device.

Capability is asked and kernels are bound when the plan is made; running it asks nobody. A plan belongs to the
selection it was made under: ``memo`` is dispatch's memo at that time, and a module drops plans whose memo is not
the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import backend_for, current_memo, resolve
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import Call

if TYPE_CHECKING:
    from te_hal.dispatch import GemmCopies
    from te_hal.modules.plan_key import PlanKey
    from te_hal.schema.formats import ColumnwiseOrder, ElementFormat, ScalingMode
    from te_hal.schema.support import Kind

Kernel = Callable[..., Any]


class Copies(NamedTuple):
    """Which copies of a quantized operand."""

    rowwise: bool
    columnwise: bool


_NO_COPIES = Copies(rowwise=False, columnwise=False)
_ROWWISE = Copies(rowwise=True, columnwise=False)


class Casts(NamedTuple):
    """The bound kernels that a quantizer calls, under the names of te_hal.ops; None where it does not call them."""

    quantize: Kernel
    amax: Kernel | None
    compute_scale: Kernel | None


class PlanCopies(NamedTuple):
    """Copies of the operands.

    Attributes:
        input_made, weight_made: made in the forward: what fprop and the backward read.
        input_kept, weight_kept: kept for the backward; none where no gradient asks for them.
        input_remade: made in the backward, where it is the original input that is kept.
        grad_made: of grad_output.
    """

    input_made: Copies = _NO_COPIES
    weight_made: Copies = _NO_COPIES
    input_kept: Copies = _NO_COPIES
    weight_kept: Copies = _NO_COPIES
    input_remade: Copies = _NO_COPIES
    grad_made: Copies = _NO_COPIES


class PlanCasts(NamedTuple):
    """Kernels for the quantizers, by role; None where nothing is cast."""

    input: Casts | None = None
    weight: Casts | None = None
    output: Casts | None = None
    grad_output: Casts | None = None
    grad_input: Casts | None = None


@dataclass(frozen=True)
class LinearPlan:
    """Bound kernels and copies of one linear layer.

    Attributes:
        key: what the plan was made for.
        memo: dispatch's memo when the plan was made.
        backend: name of the backend whose gemm runs.
        order: memory order of columnwise copies.
        copies: which copies of each operand are made and kept.
        casts: kernels that make them.
        fprop, dgrad, wgrad: gemm kernels. wgrad_into: by ``accumulate``, where main_grad takes the result.
        bias_grad: kernel.
    """

    key: PlanKey
    memo: object
    backend: str
    order: ColumnwiseOrder
    copies: PlanCopies
    casts: PlanCasts
    fprop: Kernel
    dgrad: Kernel | None
    wgrad: Kernel | None
    wgrad_into: dict[bool, Kernel]
    bias_grad: Kernel | None


def make_plan(key: PlanKey) -> LinearPlan:
    """Ask for every kernel that the layer will run.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no to one of them.
        BackendUnavailableError: no backend for the device.
    """
    memo = current_memo()
    backend = backend_for(key.device, "gemm")
    order = backend.columnwise_order
    copies = _copies(key, backend.gemm_copies)
    gemms = _Gemms(key, copies, order)
    return LinearPlan(
        key=key,
        memo=memo,
        backend=backend.name,
        order=order,
        copies=copies,
        casts=_casts(key, copies, order),
        fprop=gemms.fprop(),
        dgrad=gemms.dgrad() if key.dgrad else None,
        wgrad=gemms.wgrad() if key.wgrad and key.main_grad_dtype is None else None,
        wgrad_into=gemms.wgrad_into() if key.wgrad and key.main_grad_dtype is not None else {},
        bias_grad=_bias_grad(key) if key.bias_grad else None,
    )


def _copies(key: PlanKey, gemm_copies: Callable[..., GemmCopies]) -> PlanCopies:
    """Which copies each gemm reads, as the backend answers per layout."""
    if key.formats is None:
        return PlanCopies()
    input_format, _, grad_format, mode = key.formats
    fprop = gemm_copies("fprop", input_format, mode)
    dgrad = gemm_copies("dgrad", grad_format, mode)
    wgrad = gemm_copies("wgrad", grad_format, mode)
    of_wgrad = [wgrad.b] if key.wgrad else []
    kept_for_wgrad = [] if key.keeps_original_input else of_wgrad
    kept_for_dgrad = [dgrad.b] if key.dgrad else []
    return PlanCopies(
        input_made=_union([fprop.a, *kept_for_wgrad]),
        weight_made=_union([fprop.b, *kept_for_dgrad]),
        input_kept=_union(kept_for_wgrad),
        weight_kept=_union(kept_for_dgrad),
        input_remade=_union(of_wgrad if key.keeps_original_input else []),
        grad_made=_union([*([dgrad.a] if key.dgrad else []), *([wgrad.a] if key.wgrad else [])]),
    )


def _union(names: Iterable[str]) -> Copies:
    wanted = set(names)
    return Copies(rowwise="rowwise" in wanted, columnwise="columnwise" in wanted)


class _Gemms:
    """Resolves the gemm kernels of one plan."""

    def __init__(self, key: PlanKey, copies: PlanCopies, order: ColumnwiseOrder) -> None:
        self.key, self.copies, self.order = key, copies, order

    def fprop(self) -> Kernel:
        kinds = {"a": self._kind("input", self.copies.input_made), "b": self._kind("weight", self.copies.weight_made)}
        out_dtype = self.key.result_dtype(quantized=self.key.fp8_output)
        return self._resolve("fprop", kinds, out_dtype, bias=self.key.bias_dtype)

    def dgrad(self) -> Kernel:
        kinds = {
            "a": self._kind("grad_output", self.copies.grad_made),
            "b": self._kind("weight", self.copies.weight_kept),
        }
        return self._resolve("dgrad", kinds, self.key.result_dtype(quantized=self.key.fp8_grad))

    def wgrad(self) -> Kernel:
        return self._resolve("wgrad", self._wgrad_kinds(), self.key.dtype)

    def wgrad_into(self) -> dict[bool, Kernel]:
        kinds, dtype = self._wgrad_kinds(), self.key.main_grad_dtype
        return {
            accumulate: self._resolve("wgrad", kinds, dtype, out=dtype, accumulate=accumulate)
            for accumulate in (False, True)
        }

    def _wgrad_kinds(self) -> dict[str, Kind]:
        kept = self.copies.input_remade if self.key.keeps_original_input else self.copies.input_kept
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


def _bias_grad(key: PlanKey) -> Kernel:
    return resolve(Call("bias_grad", key.device, {"grad_output": key.dtype}, {"out_dtype": key.dtype})).kernel


def _casts(key: PlanKey, copies: PlanCopies, order: ColumnwiseOrder) -> PlanCasts:
    """The casts that will run."""
    formats = key.formats
    if formats is None:
        return PlanCasts()

    def bind(wanted: bool, fmt: ElementFormat, dtype: torch.dtype, made: Copies) -> Casts | None:
        return _bind_cast(key, formats.mode, fmt, dtype, made, order) if wanted else None

    result = key.result_dtype(quantized=True)
    return PlanCasts(
        input=bind(not key.input_is_quantized, formats.input, key.dtype, copies.input_made),
        weight=bind(True, formats.weight, key.dtype, copies.weight_made),
        output=bind(key.fp8_output, formats.weight, result, _ROWWISE),
        grad_output=bind(key.dgrad or key.wgrad, formats.grad_output, key.dtype, copies.grad_made),
        grad_input=bind(key.fp8_grad, formats.grad_output, result, _ROWWISE),
    )


def _bind_cast(
    key: PlanKey, mode: ScalingMode, fmt: ElementFormat, dtype: torch.dtype, made: Copies, order: ColumnwiseOrder
) -> Casts:
    fp32 = torch.float32
    kinds: dict[str, Kind] = {"input": dtype, "scale": fp32, "amax": fp32 if key.delayed else None, "out": None}
    flags = {
        "dtype": fmt.dtype,
        "mode": mode,
        "rowwise": made.rowwise,
        "columnwise": made.columnwise,
        "columnwise_order": order,
    }
    quantize = resolve(Call("quantize", key.device, kinds, flags)).kernel
    if key.delayed:
        return Casts(quantize, None, None)
    amax = resolve(Call("amax", key.device, {"input": dtype, "out": None}, {})).kernel
    return Casts(quantize, amax, resolve(Call("compute_scale", key.device, {"amax": fp32}, {})).kernel)
