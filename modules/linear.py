"""Linear: y = x @ weight.T + bias, in FP8 under autocast."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from te_hal.dispatch import current_memo
from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed
from te_hal.modules.arguments import refuse_later
from te_hal.modules.device import parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.linear_function import LinearCall, LinearFunction, Quantizers
from te_hal.modules.main_grad import FirstMicrobatch, main_grad_of
from te_hal.modules.plan import Formats, LinearPlan, PlanKey, make_plan
from te_hal.modules.recompute import refuse_recompute
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.split_parameters import resolve_splits
from te_hal.quantization import Float8Tensor
from te_hal.quantization.float8_quantizer import Float8Quantizer
from te_hal.quantization.scaling_state import DelayedScalingState
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.quantization.autocast import Frame

_INIT_STD = 0.023

_LATER_DEFAULTS: dict[str, object] = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
}


class Linear(Fp8Module):
    """A linear layer with Transformer Engine's arguments, defaults, parameter names and shapes.

    Args:
        in_features: size of the input's last dimension; divisible by 16 for FP8.
        out_features: size of the output's last dimension; divisible by 8 for FP8 (16 for a layer that follows).
        fuse_wgrad_accumulation: put the weight gradient into ``weight.main_grad`` (see te_hal.modules.main_grad).
        init_method: called with each weight to fill it in place; None: normal, mean 0, deviation 0.023.
        bias: have a bias, which starts at 0.
        return_bias: do not add the bias but return ``(output, bias)``.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        parameters_split: names (a tuple: equal parts) or a mapping from name to rows: the weight (and bias) as
            several parameters ``<name>_weight``, ``<name>_bias`` that act as one.
        device: None: the current backend's.
        save_original_input: keep the unquantized input for backward and quantize it again there.
        name: for messages.
        sequence_parallel, tp_group, tp_size, get_rng_state_tracker, rng_tracker_name, parallel_mode,
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name,
            delay_wgrad_compute, symmetric_ar_type: of later features; anything but the default is refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: sizes or splits that do not fit.
    """

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
        given = {argument: value for argument, value in locals().items() if argument in _LATER_DEFAULTS}
        refuse_later("Linear", given, _LATER_DEFAULTS)
        super().__init__(name)
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.init_method = init_method or partial(torch.nn.init.normal_, mean=0.0, std=_INIT_STD)
        splits = resolve_splits(out_features, parameters_split)
        self.weight_names = [f"{split}weight" for split in splits]
        self.bias_names = [f"{split}bias" for split in splits] if bias else []
        if fuse_wgrad_accumulation and len(splits) > 1:
            raise ArgumentError(
                "Linear: fuse_wgrad_accumulation",
                got=f"{len(splits)} weights by parameters_split",
                accepted="one weight: its gradient is written into one main_grad",
                todo="leave one of the two arguments out",
            )
        self._first_microbatch: FirstMicrobatch | None = None
        self._make_parameters(splits, params_dtype or torch.get_default_dtype(), parameter_device(device))

    def _make_parameters(self, splits: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        for split, rows in splits.items():
            weight = torch.empty(rows, self.in_features, dtype=dtype, device=device)
            self.register_parameter(f"{split}weight", torch.nn.Parameter(weight))
            if self.use_bias:
                self.register_parameter(
                    f"{split}bias", torch.nn.Parameter(torch.empty(rows, dtype=dtype, device=device))
                )
            else:
                # As in Transformer Engine: the attribute exists, but holds nothing and is no parameter.
                setattr(self, f"{split}bias", torch.empty(0, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights by ``init_method`` and biases to 0, in place; on the meta device nothing happens."""
        with torch.no_grad():
            for name in self.weight_names:
                weight = getattr(self, name)
                if not weight.is_meta:
                    self.init_method(weight)
            for name in self.bias_names:
                getattr(self, name).zero_()

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
            ArgumentError: shapes, dtypes or devices that do not fit; sizes that FP8 cannot take.
            UnsupportedError: the backend lacks the recipe; recompute over FP8.
        """
        self._check_arguments(inp, is_first_microbatch)
        refuse_recompute(self.label, fp8=self.fp8 or self._in_fp8_now())
        weight, bias = self._combined(self.weight_names), self._combined(self.bias_names)
        dtype = activation_dtype(self.label, inp, self._named({"weight": weight, "bias": bias}))
        if self._in_fp8_now():
            check_fp8_shape(self.label, "input", tuple(inp.shape))
            check_fp8_shape(self.label, "weight", (self.out_features, self.in_features))
        inp, weight = cast_if_needed(inp, dtype), cast_if_needed(weight, dtype)  # type: ignore[arg-type] # there is a weight
        bias = None if bias is None else cast_if_needed(bias, dtype)
        added_bias = None if self.return_bias else bias
        frame = self.begin_forward(inp.device)
        call = self._call(frame, inp, weight, added_bias, is_first_microbatch, fp8_output, fp8_grad)
        output: torch.Tensor = LinearFunction.apply(inp, weight, added_bias, call)  # type: ignore[no-untyped-call]
        if is_first_microbatch is not None and call.quantized_weight is not None:
            self._fp8_workspaces["weight"] = call.quantized_weight
        if self.return_bias:
            return output, bias if bias is not None else torch.empty(0, dtype=dtype, device=inp.device)
        return output

    @staticmethod
    def _in_fp8_now() -> bool:
        from te_hal.quantization.autocast import current_frame  # noqa: PLC0415

        return current_frame().enabled

    def _check_arguments(self, inp: object, is_first_microbatch: object) -> None:
        if not isinstance(inp, torch.Tensor):
            raise ArgumentTypeError(
                self.label, got=f"a {type(inp).__name__}", accepted="a torch.Tensor", todo="pass a tensor"
            )
        if inp.dim() == 0 or inp.shape[-1] != self.in_features:
            raise ArgumentError(
                f"{self.label}: input",
                got=f"shape {tuple(inp.shape)}",
                accepted=f"[..., {self.in_features}], as in_features={self.in_features}",
                todo="check which layer feeds this one",
            )
        if is_first_microbatch not in (None, True, False):
            raise ArgumentError(
                f"{self.label}: is_first_microbatch",
                got=repr(is_first_microbatch),
                accepted="None, True, False",
                todo="pass a bool",
            )

    def _combined(self, names: list[str]) -> torch.Tensor | None:
        parts = [getattr(self, name) for name in names]
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0] if parts else None

    @staticmethod
    def _named(parameters: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter in parameters.items() if parameter is not None}

    def _call(
        self,
        frame: Frame,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> LinearCall:
        grad = torch.is_grad_enabled()
        dgrad, wgrad = grad and inp.requires_grad, grad and weight.requires_grad
        into_main_grad = self.fuse_wgrad_accumulation and wgrad
        if frame.calibrating:
            self._calibrate(inp, weight, frame)
        keeps_original = self.save_original_input and wgrad and frame.enabled and not isinstance(inp, Float8Tensor)
        parameter = getattr(self, self.weight_names[0])
        plan = self._plan(inp, weight, bias, dgrad, wgrad, into_main_grad, keeps_original, fp8_output and frame.enabled)
        call = LinearCall(
            module=self.label,
            plan=plan,
            quantizers=self._quantizers(plan) if frame.enabled else None,
            cached_weight=None,
            parameter=parameter,
            first_microbatch=self._first_microbatch_of(is_first_microbatch) if into_main_grad else None,
            into_main_grad=into_main_grad,
            fp8_output=fp8_output,
            fp8_grad=fp8_grad,
            keeps_original_input=keeps_original,
            dgrad=dgrad,
            wgrad=wgrad,
        )
        if frame.enabled and frame.region is not None:
            call.cached_weight = self._cached_weight(plan, weight.dtype) if is_first_microbatch is False else None
            call.region = frame.region
            call.updates_backward = (dgrad or wgrad) and frame.region.take_first()
            self._note_forward(frame)
        return call

    def _quantizers(self, plan: LinearPlan) -> Quantizers:
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        if self.save_original_input and isinstance(forward[0], Float8Quantizer):
            raise ArgumentError(
                f"{self.label}: save_original_input",
                got="delayed scaling",
                accepted="a recipe whose input can be quantized again in backward",
                todo="use Float8CurrentScaling, or leave save_original_input out",
            )
        for quantizer in (*forward, *backward):
            quantizer.columnwise_order = plan.order
        of_input, of_weight, of_output = forward
        grad_output, grad_input = backward
        return Quantizers(of_input, of_weight, of_output, grad_output, grad_input, self.fp8_meta["scaling_bwd"])

    def _calibrate(self, inp: torch.Tensor, weight: torch.Tensor, frame: Frame) -> None:
        plain = inp.dequantize() if isinstance(inp, Float8Tensor) else inp
        for quantizer, tensor in zip(self.quantizers["scaling_fwd"], (plain, weight), strict=False):
            quantizer.calibrate(tensor)
        self._note_forward(frame)

    def _note_forward(self, frame: Frame) -> None:
        state = self.fp8_meta["scaling_fwd"]
        if frame.region is not None and isinstance(state, DelayedScalingState):
            frame.region.queue.add(state, forward=True)

    def _first_microbatch_of(self, is_first_microbatch: bool | None) -> FirstMicrobatch | None:
        """One object for all uses in one first microbatch; a new one once a backward has overwritten main_grad."""
        if not is_first_microbatch:
            return None
        if self._first_microbatch is None or self._first_microbatch.overwritten:
            self._first_microbatch = FirstMicrobatch()
        return self._first_microbatch

    def _cached_weight(self, plan: LinearPlan, dtype: torch.dtype) -> Any:  # noqa: ANN401 - storage or None
        """The kept weight, if it has the copies that this plan reads."""
        cached = self._fp8_workspaces.get("weight")
        if cached is None or cached.dtype != dtype or cached.columnwise_order != plan.order:
            return None
        made = plan.copies.weight_made
        fits = (cached.kind.rowwise or not made.rowwise) and (cached.kind.columnwise or not made.columnwise)
        return cached.keep(rowwise=made.rowwise, columnwise=made.columnwise) if fits else None

    def _plan(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dgrad: bool,
        wgrad: bool,
        into_main_grad: bool,
        keeps_original: bool,
        fp8_output: bool,
    ) -> LinearPlan:
        dtype = weight.dtype
        formats = self._formats(inp) if self.fp8 else None
        delayed = formats is not None and isinstance(self.fp8_meta["scaling_fwd"], DelayedScalingState)
        bias_dtype = None if bias is None else dtype
        if formats is not None and bias_dtype == torch.float32:
            bias_dtype = torch.bfloat16
        main_grad = main_grad_of(self.label, getattr(self, self.weight_names[0])) if into_main_grad else None
        key = PlanKey(
            formats=formats,
            delayed=delayed,
            dtype=dtype,
            bias_dtype=bias_dtype,
            output_dtype=torch.float32 if fp8_output and delayed else dtype,
            main_grad_dtype=None if main_grad is None else main_grad.dtype,
            device=inp.device,
            dgrad=dgrad,
            wgrad=wgrad,
            input_is_quantized=isinstance(inp, Float8Tensor),
            keeps_original_input=keeps_original,
        )
        plan: LinearPlan | None = self._plans.get(key)
        if plan is None or plan.memo is not current_memo():
            plan = self._plans[key] = make_plan(key)
        return plan

    def _formats(self, inp: torch.Tensor) -> Formats:
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        input_format = inp.quantized_storage.format if isinstance(inp, Float8Tensor) else forward.format
        return Formats(input_format, forward.format, backward.format, forward.recipe.scaling_mode)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
