"""LayerNormLinear: y = norm(x) @ weight.T + bias, in FP8 under autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.dispatch import current_memo
from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed, plain_input
from te_hal.modules.arguments import REASONS, check_callable, check_dtype, check_epsilon, check_size
from te_hal.modules.call_checks import check_call
from te_hal.modules.delayed_wgrad import Target
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.gemm_parameters import DEFAULT_INIT, GemmParameters, returned_bias
from te_hal.modules.layernorm_linear_function import LayerNormLinearCall, LayerNormLinearFunction
from te_hal.modules.main_grad import Microbatches, main_grad_dtype
from te_hal.modules.norm_parameters import NormParameters, norm_op
from te_hal.modules.norm_stage import NormStage, make_norm_stage
from te_hal.modules.plan import LinearPlan, make_plan
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.plan_key import PlanKey, plan_key
from te_hal.modules.recompute import recomputable
from te_hal.modules.rng_tracker import forked
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.split_parameters import refuse_several, resolve_splits
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.autocast import current_frame
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from te_hal.modules.gemm_parameters import Read
    from te_hal.modules.norm_function import NormKey
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.operand_formats import Formats

_REFUSED = declare(
    "LayerNormLinear",
    {
        "sequence_parallel": False,
        "tp_group": None,
        "tp_size": 1,
        "parallel_mode": None,
        "return_layernorm_output_gathered": False,
        "ub_overlap_ag": False,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_wgrad": False,
        "ub_bulk_dgrad": False,
        "ub_name": None,
        "symmetric_ar_type": None,
    },
    REASONS,
)
_REFUSED_IN_CALL = declare(
    "LayerNormLinear.forward",
    {"fp8_grad": False},
    {"fp8_grad": "the norm's backward gives the gradient in the activation dtype, and the layer before casts it"},
)


class LayerNormLinearKey(NamedTuple):
    """What decides what a call runs, the selection aside."""

    norm: NormKey
    linear: PlanKey


class LayerNormLinearPlan(NamedTuple):
    """What a call runs; ``memo`` is dispatch's memo when it was bound."""

    key: LayerNormLinearKey
    memo: object
    norm: NormStage
    linear: LinearPlan


def make_layernorm_linear_plan(key: LayerNormLinearKey) -> LayerNormLinearPlan:
    """Ask for every kernel that the layer will run.

    Raises:
        UnsupportedError: the backend, and every fallback that the policy lists, says no to one of them.
        BackendUnavailableError: no backend for the device.
    """
    memo, linear = current_memo(), make_plan(key.linear)
    return LayerNormLinearPlan(key, memo, make_norm_stage(key.norm, linear), linear)


class LayerNormLinear(Fp8Module):
    """A norm and a linear layer with Transformer Engine's arguments, defaults, parameter names and shapes.

    Under FP8 the norm quantizes its result in one pass (docs/numerics.md, F1), unless that result is returned as well.

    Args:
        in_features: size of the input's last dimension, over which is normalised; divisible by 16 for FP8.
        out_features: size of the output's last dimension; divisible by 8 for FP8 (16 for a layer that follows).
        eps: added under the norm's root.
        fuse_wgrad_accumulation: put the weight gradient into ``weight.main_grad`` (see te_hal.modules.main_grad).
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised; None: outside of any.
        init_method: called with each weight to fill it in place; None: normal, mean 0, deviation 0.023.
        bias: have a bias, which starts at 0.
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: do not add the bias but return it after the output.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        return_layernorm_output: return the norm's result as well, last.
        parameters_split: as in Linear.
        zero_centered_gamma: gamma is stored minus one, starts at 0, and the one is added in fp32.
        device: None: the current backend's.
        delay_wgrad_compute: as in Linear.
        name: for messages.
        sequence_parallel, tp_group, tp_size, parallel_mode, return_layernorm_output_gathered, ub_overlap_ag,
            ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_wgrad, ub_bulk_dgrad, ub_name, symmetric_ar_type: of later
            features; anything but the default is refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: an unknown normalization; sizes or splits that do not fit; an ``eps`` that is negative or no
            number; a flag that is no bool; a dtype that no gemm takes; no device.
    """

    takes_backward_override = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        kind = "LayerNormLinear"
        refuse(kind, locals(), _REFUSED)
        flags = {
            "delay_wgrad_compute": delay_wgrad_compute,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias": bias,
            "return_bias": return_bias,
            "return_layernorm_output": return_layernorm_output,
            "zero_centered_gamma": zero_centered_gamma,
        }
        check_flags(kind, flags)
        check_callable(f"{kind}: init_method", init_method)
        check_callable(f"{kind}: get_rng_state_tracker", get_rng_state_tracker)
        super().__init__(name, PlanCache(make_layernorm_linear_plan))
        self.in_features = check_size(f"{kind}: in_features", in_features)
        self.out_features = check_size(f"{kind}: out_features", out_features)
        self.eps, self.zero_centered_gamma = check_epsilon(f"{kind}: eps", eps), zero_centered_gamma
        self.normalization = normalization
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.init_method, self.get_rng_state_tracker = init_method or DEFAULT_INIT, get_rng_state_tracker
        splits = resolve_splits(kind, out_features, parameters_split)
        if fuse_wgrad_accumulation:
            refuse_several(kind, splits)
        self._norm = NormParameters(norm_op(kind, normalization), in_features)
        self._gemm = GemmParameters(in_features, splits, bias=bias)
        self._microbatches = Microbatches()
        dtype, place = check_dtype(f"{kind}: params_dtype", params_dtype), parameter_device(device, f"{kind}: device")
        self._norm.register(self, dtype, place)
        self._gemm.register(self, dtype, place)
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
        """Weights by ``init_method``, biases to 0, gamma to 1 (0 where it is zero-centered), beta to 0, in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        self._norm.fill(self, zero_centered_gamma=self.zero_centered_gamma)
        with forked(self.get_rng_state_tracker):
            self._gemm.fill(self, self.init_method)

    @run_eagerly
    @recomputable
    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the layer.

        Args:
            inp: ``[..., in_features]``; a Float8Tensor is dequantized.
            is_first_microbatch: as in Linear.
            fp8_output: under FP8, return a Float8Tensor (rowwise copy only).
            fp8_grad: True is refused: the norm's backward gives a plain gradient.

        Returns:
            ``[..., out_features]`` in the activation dtype; with ``return_bias`` followed by the bias, with
            ``return_layernorm_output`` by the norm's result ``[..., in_features]``, in this order.

        Raises:
            ArgumentTypeError: the input is no tensor.
            ArgumentError: shapes, dtypes or devices that do not fit; sizes that FP8 cannot take; a flag that is no
                bool.
            StateError: under ``fuse_wgrad_accumulation``, a weight without a ``main_grad`` that fits.
            UnsupportedError: the backend lacks the recipe; an FP8 forward inside a backward, by a hook.
        """
        frame, label = current_frame(), self.label
        check_call(self, inp, ("in_features", self.in_features), is_first_microbatch, frame)
        refuse(label, {"fp8_grad": fp8_grad}, _REFUSED_IN_CALL)
        check_flags(label, {"fp8_output": fp8_output})
        formats = self.formats(frame, inp.device)
        if formats is not None:
            check_fp8_shape(label, "input", tuple(inp.shape), formats)
            weight_shape, names = (self.out_features, self.in_features), ("out_features", "in_features")
            check_fp8_shape(label, "weight", weight_shape, formats, names)
        read, norm = self._gemm.read(self, label), self._norm.read(self, label)
        dtype = activation_dtype(label, inp, **norm, weight=read.weight, bias=read.bias)
        inp, weight = plain_input(inp, dtype), cast_if_needed(read.weight, dtype)
        gamma, beta, bias = (None if t is None else cast_if_needed(t, dtype) for t in (*norm.values(), read.bias))
        added = None if self.return_bias else bias
        plan = self._plans.get(self._key(label, formats, inp, (gamma, beta, weight, added), read, fp8_output))
        self.begin_forward(frame, inp.device, plan.linear.order)
        call, quantized = self._call(label, frame, plan, read, weight, is_first_microbatch)
        found = LayerNormLinearFunction.apply(inp, gamma, beta, weight, added, quantized, call)  # type: ignore[no-untyped-call]
        if not self.return_bias:
            return found  # type: ignore[no-any-return]
        output, *normed = found if self.return_layernorm_output else (found,)
        return (output, returned_bias(bias, dtype, inp.device), *normed)

    def _key(
        self,
        label: str,
        formats: Formats | None,
        inp: torch.Tensor,
        parameters: tuple[Any, ...],
        read: Read,
        fp8_output: bool,
    ) -> LayerNormLinearKey:
        gamma, beta, weight, added = parameters
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled() and weight.requires_grad
        linear = plan_key(
            formats,
            inp,
            weight,
            added,
            needs_dgrad=any(t is not None and t.requires_grad for t in (inp, gamma, beta)),
            input_is_quantized=not self.return_layernorm_output,
            main_grad_dtype=main_grad_dtype(label, read.parts[0]) if fused else None,
            fp8_output=fp8_output,
        )
        norm = self._norm.key(weight.dtype, inp.device, self.eps, self.zero_centered_gamma)
        return LayerNormLinearKey(norm, linear)

    def _call(
        self,
        label: str,
        frame: Frame,
        plan: LayerNormLinearPlan,
        read: Read,
        weight: torch.Tensor,
        is_first_microbatch: bool | None,
    ) -> tuple[LayerNormLinearCall, Any]:
        """What the autograd Function needs besides plain tensors: its call, and the weight that gemms read."""
        key, quantized, calibrates = plan.linear.key, None, None
        if frame.enabled:
            quantized = self.quantized_weight(
                frame, "weight", read.parts, weight.detach(), plan.linear, is_first_microbatch
            )
        elif frame.calibrating:
            calibrates, of_weight = self.quantizers["scaling_fwd"][:2]
            of_weight.calibrate(weight)
        fuses = self.fuse_wgrad_accumulation and weight.requires_grad
        first = self.note_microbatch(frame, self._microbatches, is_first_microbatch, fuses=fuses)
        self.note_forward(frame)
        linear = self.linear_call(
            label, frame, plan.linear, read.parts[0], first, updates_backward=key.dgrad or key.wgrad
        )
        return LayerNormLinearCall(plan.norm, linear, self.return_layernorm_output, calibrates), quantized

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization!r}"
        )
