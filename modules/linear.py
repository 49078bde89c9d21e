"""Linear: y = x @ weight.T + bias, in FP8 under autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed
from te_hal.modules.arguments import REASONS, check_callable, check_dtype, check_size
from te_hal.modules.call_checks import check_call, check_kept_input
from te_hal.modules.delayed_wgrad import Target
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.gemm_parameters import DEFAULT_INIT, GemmParameters, returned_bias
from te_hal.modules.linear_function import LinearFunction
from te_hal.modules.main_grad import Microbatches, main_grad_dtype
from te_hal.modules.plan import make_plan
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.plan_key import plan_key
from te_hal.modules.recompute import recomputable
from te_hal.modules.rng_tracker import forked
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.split_parameters import refuse_several, resolve_splits
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import Float8Tensor, QuantizedTensor
from te_hal.quantization.autocast import current_frame
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.quantization.operand_formats import Formats

_REFUSED = declare(
    "Linear",
    {
        "sequence_parallel": False,
        "tp_group": None,
        "tp_size": 1,
        "parallel_mode": None,
        "ub_overlap_ag": False,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False,
        "ub_bulk_wgrad": False,
        "ub_name": None,
        "symmetric_ar_type": None,
    },
    REASONS,
)


class Linear(Fp8Module):
    """A linear layer with Transformer Engine's arguments, defaults, parameter names and shapes.

    Args:
        in_features: size of the input's last dimension; divisible by 16 for FP8.
        out_features: size of the output's last dimension; divisible by 8 for FP8 (16 for a layer that follows).
        fuse_wgrad_accumulation: put the weight gradient into ``weight.main_grad`` (see te_hal.modules.main_grad).
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised; None: outside of any.
        rng_tracker_name: of that fork; None: the tracker's default.
        init_method: called with each weight to fill it in place; None: normal, mean 0, deviation 0.023.
        bias: have a bias, which starts at 0.
        return_bias: do not add the bias but return ``(output, bias)``.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        parameters_split: names (a tuple: equal parts) or a mapping from name to rows: the weight (and bias) as
            several parameters ``<name>_weight``, ``<name>_bias`` that act as one.
        device: None: the current backend's.
        save_original_input: keep the unquantized input for backward and quantize it again there. Without effect under a
            recipe with a ``backward_override``, which says what is kept.
        delay_wgrad_compute: the backward leaves the weight gradient to :meth:`backward_dw`.
        name: for messages.
        sequence_parallel, tp_group, tp_size, parallel_mode, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad,
            ub_bulk_dgrad, ub_bulk_wgrad, ub_name, symmetric_ar_type: of later features; anything but the default is
            refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: sizes or splits that do not fit; a flag that is no bool; a dtype that no gemm takes; no device.
    """

    takes_backward_override = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        refuse("Linear", locals(), _REFUSED)
        flags = {
            "delay_wgrad_compute": delay_wgrad_compute,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias": bias,
            "return_bias": return_bias,
            "save_original_input": save_original_input,
        }
        check_flags("Linear", flags)
        check_callable("Linear: init_method", init_method)
        check_callable("Linear: get_rng_state_tracker", get_rng_state_tracker)
        super().__init__(name, PlanCache(make_plan))
        self.in_features = check_size("Linear: in_features", in_features)
        self.out_features = check_size("Linear: out_features", out_features)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.init_method = init_method or DEFAULT_INIT
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        splits = resolve_splits("Linear", out_features, parameters_split)
        if fuse_wgrad_accumulation:
            refuse_several("Linear", splits)
        self._gemm = GemmParameters(in_features, splits, bias=bias)
        self._microbatches = Microbatches()
        dtype = check_dtype("Linear: params_dtype", params_dtype)
        self._gemm.register(self, dtype, parameter_device(device, "Linear: device"))
        first_reset(self)
        if delay_wgrad_compute:
            self.delay_wgrads([Target(tuple(self.weight_names))])

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights, in order."""
        return self._gemm.weight_names

    @property
    def bias_names(self) -> list[str]:
        """Names of the biases, in order; none without a bias."""
        return self._gemm.bias_names

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise weights by ``init_method`` and biases to 0, in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        with forked(self.get_rng_state_tracker, self.rng_tracker_name):
            self._gemm.fill(self, self.init_method)

    @run_eagerly
    @recomputable
    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer.

        Args:
            inp: ``[..., in_features]``; plain, or a Float8Tensor that another module returned.
            is_first_microbatch: None: quantize the weight now. True: quantize it and keep the result. False: use
                what was kept, made now if there is none.
            fp8_output: under FP8, return a Float8Tensor (rowwise copy only).
            fp8_grad: under FP8, hand a Float8Tensor to the input's gradient.

        Returns:
            ``[..., out_features]`` in the activation dtype; with ``return_bias`` the pair ``(output, bias)``.

        Raises:
            ArgumentTypeError: the input is no tensor.
            ArgumentError: shapes, dtypes or devices that do not fit; sizes that FP8 cannot take; a flag that is no
                bool.
            StateError: under ``fuse_wgrad_accumulation``, a weight without a ``main_grad`` that fits.
            UnsupportedError: the backend lacks the recipe; an FP8 forward inside a backward, by a hook.
        """
        frame, label = current_frame(), self.label
        check_call(self, inp, ("in_features", self.in_features), is_first_microbatch, frame)
        formats = self.formats(frame, inp.device)
        if formats is not None:
            self._check_fp8(label, tuple(inp.shape), formats)
        if fp8_output is not False or fp8_grad is not False:
            check_flags(label, {"fp8_output": fp8_output, "fp8_grad": fp8_grad})
        weights, weight, bias = self._gemm.read(self, label)
        dtype = activation_dtype(label, inp, weight=weight, bias=bias)
        inp, weight = _as_input(inp, dtype, fp8=frame.enabled), cast_if_needed(weight, dtype)
        bias = None if bias is None else cast_if_needed(bias, dtype)
        added = None if self.return_bias else bias
        fuses = self.fuse_wgrad_accumulation and weight.requires_grad
        plan = self._plans.get(
            plan_key(
                formats,
                inp,
                weight,
                added,
                main_grad_dtype=main_grad_dtype(label, weights[0]) if fuses and torch.is_grad_enabled() else None,
                keeps_original_input=self.save_original_input,
                fp8_output=fp8_output,
                fp8_grad=fp8_grad,
            )
        )
        self.begin_forward(frame, inp.device, plan.order)
        quantized = None
        if frame.enabled:
            quantized = self.quantized_weight(frame, "weight", weights, weight.detach(), plan, is_first_microbatch)
        elif frame.calibrating:
            self.calibrate(inp, weight)
        first = self.note_microbatch(frame, self._microbatches, is_first_microbatch, fuses=fuses)
        self.note_forward(frame)
        call = self.linear_call(
            label, frame, plan, weights[0], first, updates_backward=plan.key.dgrad or plan.key.wgrad
        )
        output: torch.Tensor = LinearFunction.apply(inp, weight, added, quantized, call)  # type: ignore[no-untyped-call]
        if self.return_bias:
            return output, returned_bias(bias, dtype, inp.device)
        return output

    def _check_fp8(self, label: str, shape: tuple[int, ...], formats: Formats) -> None:
        check_fp8_shape(label, "input", shape, formats)
        weight_shape, names = (self.out_features, self.in_features), ("out_features", "in_features")
        check_fp8_shape(label, "weight", weight_shape, formats, names)
        if self.save_original_input:
            check_kept_input(label, formats)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def _as_input(inp: torch.Tensor, dtype: torch.dtype, *, fp8: bool) -> torch.Tensor:
    """The input in the activation dtype; quantized stays quantized where FP8 gemms take it."""
    if isinstance(inp, QuantizedTensor) and not (fp8 and isinstance(inp, Float8Tensor)):
        # Products that sum over rows read a copy that this one may lack, and that its codes do not give.
        return inp.dequantize(dtype=dtype)
    return cast_if_needed(inp, dtype)
