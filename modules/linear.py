"""Linear: y = x @ weight.T + bias, in FP8 under autocast."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed
from te_hal.modules.arguments import check_callable, check_dtype, check_flags, check_size, refuse_later
from te_hal.modules.device import parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.linear_call import LinearCall, Quantizers
from te_hal.modules.linear_function import LinearFunction
from te_hal.modules.main_grad import FirstMicrobatch, Microbatches, main_grad_dtype
from te_hal.modules.plan_key import plan_key
from te_hal.modules.recompute import refuse_recompute
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.split_parameters import resolve_splits
from te_hal.modules.transforms import refuse_transforms, run_eagerly
from te_hal.quantization import Float8Tensor
from te_hal.quantization.autocast import current_frame
from te_hal.quantization.scaling_state import DelayedScalingState
from te_hal.recipe import DelayedScaling
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.modules.plan import LinearPlan
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
        ArgumentError: sizes or splits that do not fit; a flag that is no bool; a dtype that no gemm takes; no device.
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
        flags = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias": bias,
            "return_bias": return_bias,
            "save_original_input": save_original_input,
        }
        check_flags("Linear", flags)
        check_callable("Linear: init_method", init_method)
        super().__init__(name)
        self.in_features = check_size("Linear: in_features", in_features)
        self.out_features = check_size("Linear: out_features", out_features)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.init_method = init_method or partial(torch.nn.init.normal_, mean=0.0, std=_INIT_STD)
        splits = resolve_splits(out_features, parameters_split)
        self.weight_names = [f"{split}weight" for split in splits]
        self.bias_names = [f"{split}bias" for split in splits] if bias else []
        if fuse_wgrad_accumulation:
            _refuse_several(splits)
        self._microbatches = Microbatches()
        dtype = check_dtype("Linear: params_dtype", params_dtype)
        self._make_parameters(splits, dtype, parameter_device(device, "Linear: device"))

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

    @run_eagerly
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
            UnsupportedError: the backend lacks the recipe; an FP8 forward inside a backward, as in recompute.
        """
        frame, label = current_frame(), self.label
        self._check_call(label, inp, is_first_microbatch, frame)
        if fp8_output is not False or fp8_grad is not False:
            check_flags(label, {"fp8_output": fp8_output, "fp8_grad": fp8_grad})
        weights, weight, bias, dtype = self._operands(label, inp)
        inp = _as_input(inp, dtype, fp8=frame.enabled)
        added = None if self.return_bias else bias
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled() and weight.requires_grad
        plan = self._plans.get(
            plan_key(
                frame.recipe if frame.enabled else None,
                inp,
                weight,
                added,
                main_grad_dtype=main_grad_dtype(label, weights[0]) if fused else None,
                keeps_original_input=self.save_original_input,
                fp8_output=fp8_output,
                fp8_grad=fp8_grad,
            )
        )
        self.begin_forward(frame, inp.device, plan.order)
        quantized = None
        if frame.enabled:
            quantized = self.quantized_weight("weight", weights, weight.detach(), plan, is_first_microbatch)
        elif frame.calibrating:
            self._record_amax_of(inp, weight)
        first = self._microbatches.note(is_first_microbatch) if plan.key.main_grad_dtype is not None else None
        call = self._call(label, frame, plan, weights[0], first)
        output: torch.Tensor = LinearFunction.apply(inp, weight, added, quantized, call)  # type: ignore[no-untyped-call]
        if self.return_bias:
            return output, bias if bias is not None else torch.empty(0, dtype=dtype, device=inp.device)
        return output

    def _operands(
        self, label: str, inp: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None, torch.dtype]:
        """The weights as the user holds them; weight and bias as one each in the activation dtype; that dtype."""
        weights = [getattr(self, name) for name in self.weight_names]
        weight, bias = _joined(weights), _joined([getattr(self, name) for name in self.bias_names])
        dtype = activation_dtype(label, inp, weight=weight, bias=bias)
        # Bound kernels check no shapes, and parameters can be replaced.
        if weight.shape != (self.out_features, self.in_features):
            raise _replaced(label, "weight", weight, (self.out_features, self.in_features))
        if bias is None:
            return weights, cast_if_needed(weight, dtype), None, dtype
        if bias.shape != (self.out_features,):
            raise _replaced(label, "bias", bias, (self.out_features,))
        return weights, cast_if_needed(weight, dtype), cast_if_needed(bias, dtype), dtype

    def _check_call(self, label: str, inp: object, is_first_microbatch: object, frame: Frame) -> None:
        """Refuse what cannot work, before anything has changed."""
        refuse_transforms(label)
        refuse_recompute(label, fp8=self.fp8 or frame.enabled)
        if not isinstance(inp, torch.Tensor):
            raise ArgumentTypeError(
                label, got=f"a {type(inp).__name__}", accepted="a torch.Tensor", todo="pass a tensor"
            )
        if inp.dim() == 0 or inp.shape[-1] != self.in_features:
            raise ArgumentError(
                f"{label}: input",
                got=f"shape {tuple(inp.shape)}",
                accepted=f"[..., {self.in_features}], as in_features={self.in_features}",
                todo="check which layer feeds this one",
            )
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise ArgumentError(
                f"{label}: is_first_microbatch",
                got=repr(is_first_microbatch),
                accepted="None, True, False",
                todo="pass a bool",
            )
        if frame.enabled:
            self._check_fp8(label, tuple(inp.shape), frame)

    def _check_fp8(self, label: str, shape: tuple[int, ...], frame: Frame) -> None:
        check_fp8_shape(label, "input", shape)
        check_fp8_shape(label, "weight", (self.out_features, self.in_features))
        if self.save_original_input and isinstance(frame.recipe, DelayedScaling):
            raise ArgumentError(
                f"{label}: save_original_input",
                got="delayed scaling",
                accepted="a recipe whose input can be quantized again in backward",
                todo="use Float8CurrentScaling, or leave save_original_input out",
            )

    def _record_amax_of(self, *tensors: torch.Tensor) -> None:
        for quantizer, tensor in zip(self.quantizers["scaling_fwd"], tensors, strict=False):
            quantizer.calibrate(tensor)

    def _call(
        self, label: str, frame: Frame, plan: LinearPlan, parameter: torch.Tensor, first: FirstMicrobatch | None
    ) -> LinearCall:
        """What the autograd Function needs besides tensors; notes which states this call records an amax in."""
        region, meta, key = frame.region, self.fp8_meta, plan.key
        state = meta.get("scaling_fwd") if frame.enabled or frame.calibrating else None
        if region is not None and isinstance(state, DelayedScalingState):
            region.queue.add(state, forward=True)
        if not frame.enabled:
            return LinearCall(label, plan, None, parameter, first, None, updates_backward=False)
        quantizers = Quantizers.of(self.quantizers, meta["scaling_bwd"])
        updates = region is not None and (key.dgrad or key.wgrad) and region.take_first()
        return LinearCall(label, plan, quantizers, parameter, first, region, updates)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def _refuse_several(splits: Mapping[str, int]) -> None:
    if len(splits) > 1:
        raise ArgumentError(
            "Linear: fuse_wgrad_accumulation",
            got=f"{len(splits)} weights by parameters_split",
            accepted="one weight: its gradient is written into one main_grad",
            todo="leave one of the two arguments out",
        )


def _replaced(label: str, name: str, parameter: torch.Tensor, shape: tuple[int, ...]) -> ArgumentError:
    return ArgumentError(
        f"{label}: {name}",
        got=f"shape {tuple(parameter.shape)}",
        accepted=f"{shape}, the shape that the layer was made with",
        todo="make a new layer for other sizes",
    )


def _joined(parts: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401 - a tensor unless there are no parts
    """Split parameters as one tensor; None without any."""
    if len(parts) > 1:
        return torch.cat(list(parts))
    return parts[0] if parts else None


def _as_input(inp: torch.Tensor, dtype: torch.dtype, *, fp8: bool) -> torch.Tensor:
    """The input in the activation dtype; quantized stays quantized where FP8 gemms take it."""
    if isinstance(inp, Float8Tensor) and not fp8:
        return inp.dequantize(dtype=dtype)
    return cast_if_needed(inp, dtype)
