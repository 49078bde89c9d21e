"""LayerNormMLP: y = activation(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias, in FP8 under autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed, plain_input
from te_hal.modules.activation_stage import check_activation, is_gated
from te_hal.modules.arguments import (
    REASONS,
    check_callable,
    check_dtype,
    check_epsilon,
    check_prepared_sizes,
    check_size,
)
from te_hal.modules.call_checks import check_call
from te_hal.modules.delayed_wgrad import Target
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.gemm_parameters import DEFAULT_INIT, GemmParameters, returned_bias
from te_hal.modules.layernorm_mlp_function import LayerNormMLPCall, LayerNormMLPFunction
from te_hal.modules.layernorm_mlp_plan import layernorm_mlp_key, make_layernorm_mlp_plan, needs_gradient
from te_hal.modules.main_grad import Microbatches, main_grad_dtype
from te_hal.modules.norm_parameters import NormParameters, norm_op
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.recompute import computes_for_backward, recomputable
from te_hal.modules.rng_tracker import forked
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.autocast import current_frame
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from te_hal.modules.gemm_parameters import Read
    from te_hal.modules.layernorm_mlp_plan import LayerNormMLPKey, LayerNormMLPPlan
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.operand_formats import Formats

_REFUSED = declare(
    "LayerNormMLP",
    {
        "sequence_parallel": False,
        "tp_group": None,
        "tp_size": 1,
        "return_layernorm_output_gathered": False,
        "set_parallel_mode": False,
        "ub_overlap_ag": False,
        "ub_overlap_rs": False,
        "ub_overlap_rs_dgrad": False,
        "ub_bulk_dgrad": False,
        "ub_bulk_wgrad": False,
        "symmetric_ar_type": None,
    },
    REASONS,
)

#: The products, in slot order.
_GEMMS = ("fc1", "fc2")


class LayerNormMLP(Fp8Module):
    """A norm, two linear layers and an activation between, with Transformer Engine's arguments and parameter names.

    Under FP8 the norm, the activation and its backward quantize their results in one pass (docs/numerics.md, F1 to F3).

    Args:
        hidden_size: last size of input and output; divisible by 16 for FP8.
        ffn_hidden_size: size between the layers; divisible by 16 for FP8.
        eps: added under the norm's root.
        return_bias: do not add the last bias but return it after the output.
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised; None: outside of any.
        init_method: called with fc1_weight to fill it in place; None: normal, mean 0, deviation 0.023.
        bias: have both biases, which start at 0.
        normalization: "LayerNorm" or "RMSNorm".
        activation: gelu, qgelu, relu, srelu, silu; gated, with an fc1 of twice ``ffn_hidden_size`` rows: geglu, glu,
            qgeglu, reglu, sreglu, swiglu, clamped_swiglu (docs/numerics.md, V1 to V3).
        activation_params: of clamped_swiglu: a dict, ``limit`` (7.0), ``alpha`` (1.702), ``glu_linear_offset`` (1.0).
        output_layer_init_method: as ``init_method``, for fc2_weight.
        fuse_wgrad_accumulation: put weight gradients into ``main_grad`` (see te_hal.modules.main_grad).
        params_dtype: dtype of the parameters; None: torch's default dtype.
        return_layernorm_output: return the norm's result as well, last.
        zero_centered_gamma: gamma is stored minus one, starts at 0, and the one is added in fp32.
        device: None: the current backend's.
        delay_wgrad_compute: the backward leaves both weight gradients to :meth:`backward_dw`.
        checkpoint: keep nothing but the input; the backward runs norm, fc1 and activation again (docs/recompute.md).
        name: for messages.
        seq_length, micro_batch_size: accepted, for callers written for Transformer Engine; here nothing is prepared for
            them.
        sequence_parallel, tp_group, tp_size, return_layernorm_output_gathered,
            set_parallel_mode, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad,
            symmetric_ar_type: of later features; anything but the default is refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: an unknown activation or normalization; sizes that are no positive ints; an ``eps`` that is
            negative or no number; a flag that is no bool; a dtype that no gemm takes; no device.
    """

    num_gemms: ClassVar[int] = 2
    gemm_names: ClassVar[tuple[str, ...]] = _GEMMS

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: object = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        kind = "LayerNormMLP"
        refuse(kind, locals(), _REFUSED)
        flags = {
            "delay_wgrad_compute": delay_wgrad_compute,
            "checkpoint": checkpoint,
            "return_bias": return_bias,
            "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "return_layernorm_output": return_layernorm_output,
            "zero_centered_gamma": zero_centered_gamma,
        }
        check_flags(kind, flags)
        check_prepared_sizes(kind, seq_length, micro_batch_size)
        check_callable(f"{kind}: init_method", init_method)
        check_callable(f"{kind}: output_layer_init_method", output_layer_init_method)
        check_callable(f"{kind}: get_rng_state_tracker", get_rng_state_tracker)
        super().__init__(name, PlanCache(make_layernorm_mlp_plan))
        self.hidden_size = check_size(f"{kind}: hidden_size", hidden_size)
        self.ffn_hidden_size = check_size(f"{kind}: ffn_hidden_size", ffn_hidden_size)
        self.eps, self.zero_centered_gamma = check_epsilon(f"{kind}: eps", eps), zero_centered_gamma
        self.normalization, self.activation = normalization, activation
        self._activation_parameters = check_activation(kind, activation, activation_params)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.checkpoint = checkpoint
        self.init_method = init_method or DEFAULT_INIT
        self.output_layer_init_method = output_layer_init_method or DEFAULT_INIT
        self.get_rng_state_tracker = get_rng_state_tracker
        self._norm = NormParameters(norm_op(kind, normalization), hidden_size)
        rows = 2 * ffn_hidden_size if is_gated(activation) else ffn_hidden_size
        self._gemms = {
            "fc1": GemmParameters(hidden_size, {"": rows}, bias=bias, prefix="fc1_"),
            "fc2": GemmParameters(ffn_hidden_size, {"": hidden_size}, bias=bias, prefix="fc2_"),
        }
        self._microbatches = {gemm: Microbatches() for gemm in _GEMMS}
        dtype, place = check_dtype(f"{kind}: params_dtype", params_dtype), parameter_device(device, f"{kind}: device")
        self._norm.register(self, dtype, place)
        for parameters in self._gemms.values():
            parameters.register(self, dtype, place)
        first_reset(self)
        if delay_wgrad_compute:
            self.delay_wgrads([Target((f"{gemm}_weight",)) for gemm in _GEMMS])

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Weights by their init methods, biases to 0, gamma to 1 (0 where it is zero-centered), beta to 0, in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        self._norm.fill(self, zero_centered_gamma=self.zero_centered_gamma)
        with forked(self.get_rng_state_tracker):
            self._gemms["fc1"].fill(self, self.init_method)
            self._gemms["fc2"].fill(self, self.output_layer_init_method)

    @run_eagerly
    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Apply the layers.

        Args:
            inp: ``[..., hidden_size]``; a Float8Tensor is dequantized.
            is_first_microbatch: as in Linear, for both weights.

        Returns:
            ``[..., hidden_size]`` in the activation dtype; with ``return_bias`` followed by fc2's bias, with
            ``return_layernorm_output`` by the norm's result, in this order.

        Raises:
            ArgumentTypeError: the input is no tensor.
            ArgumentError: shapes, dtypes or devices that do not fit; sizes that FP8 cannot take; a flag that is no
                bool.
            StateError: under ``fuse_wgrad_accumulation``, a weight without a ``main_grad`` that fits.
            UnsupportedError: the backend lacks the recipe; an FP8 forward inside a backward, by a hook.
        """
        if not self.checkpoint or not torch.is_grad_enabled():
            return self._forward(inp, is_first_microbatch)
        found: torch.Tensor | tuple[torch.Tensor, ...] = torch_checkpoint(
            self._forward, inp, is_first_microbatch, use_reentrant=False
        )
        return found

    @recomputable
    def _forward(self, inp: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        frame, label = current_frame(), self.label
        check_call(self, inp, ("hidden_size", self.hidden_size), is_first_microbatch, frame)
        formats = self._formats(frame, inp.device)
        if formats is not None:
            self._check_fp8(label, tuple(inp.shape), formats)
        read = {gemm: parameters.read(self, label) for gemm, parameters in self._gemms.items()}
        given = self._norm.read(self, label)
        for gemm, (_, weight, bias) in read.items():
            given |= {f"{gemm}_weight": weight, f"{gemm}_bias": bias}
        dtype = activation_dtype(label, inp, **given)
        inp = plain_input(inp, dtype)
        parameters = {name: None if value is None else cast_if_needed(value, dtype) for name, value in given.items()}
        added = parameters | ({"fc2_bias": None} if self.return_bias else {})
        plan = self._plans.get(self._key(label, formats, inp, added, read))
        self.begin_forward(frame, inp.device, plan.fc1.order)
        call, quantized = self._call(label, frame, plan, read, added, is_first_microbatch)
        found = LayerNormMLPFunction.apply(inp, *added.values(), quantized, call)  # type: ignore[no-untyped-call]
        if not self.return_bias:
            return found  # type: ignore[no-any-return]
        output, *normed = found if self.return_layernorm_output else (found,)
        return (output, returned_bias(parameters["fc2_bias"], dtype, inp.device), *normed)

    def _formats(self, frame: Frame, device: torch.device) -> dict[str, Formats] | None:
        """What the operands of both products become; None without FP8."""
        first, second = self.formats(frame, device), self.formats(frame, device, gemm=1)
        return None if first is None or second is None else {"fc1": first, "fc2": second}

    def _check_fp8(self, label: str, shape: tuple[int, ...], formats: Mapping[str, Formats]) -> None:
        check_fp8_shape(label, "input", shape, formats["fc1"])
        for gemm, names in (("fc2", ("hidden_size", "ffn_hidden_size")), ("fc1", ("ffn_hidden_size", "hidden_size"))):
            check_fp8_shape(label, f"{gemm}_weight", self._gemms[gemm].shape, formats[gemm], names)

    def _key(
        self,
        label: str,
        formats: Mapping[str, Formats] | None,
        inp: torch.Tensor,
        given: Mapping[str, Any],
        read: Mapping[str, Read],
    ) -> LayerNormMLPKey:
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        main_grads = {
            gemm: main_grad_dtype(label, read[gemm].parts[0])
            if fused and needs_gradient(given[f"{gemm}_weight"])
            else None
            for gemm in _GEMMS
        }
        norm = self._norm.key(given["fc1_weight"].dtype, inp.device, self.eps, self.zero_centered_gamma)
        activation = (self.activation, self._activation_parameters)
        quantizes_norm = not self.return_layernorm_output
        return layernorm_mlp_key(formats, inp, given, main_grads, norm, activation, quantizes_norm=quantizes_norm)

    def _call(
        self,
        label: str,
        frame: Frame,
        plan: LayerNormMLPPlan,
        read: Mapping[str, Read],
        given: Mapping[str, Any],
        is_first_microbatch: bool | None,
    ) -> tuple[LayerNormMLPCall, tuple[Any, Any]]:
        """What the autograd Function needs besides plain tensors: its call, and the weights that gemms read."""
        quantized, calls, calibrates = [], [], []
        updates = plan.fc2.key.dgrad or plan.fc2.key.wgrad
        for number, (gemm, of) in enumerate((("fc1", plan.fc1), ("fc2", plan.fc2))):
            weight, parts = given[f"{gemm}_weight"], read[gemm].parts
            stored = quantizer = None
            if frame.enabled:
                name = f"{gemm}_weight"
                stored = self.quantized_weight(frame, name, parts, weight.detach(), of, is_first_microbatch, number)
            elif frame.calibrating:
                quantizer, of_weight = self.quantizers["scaling_fwd"][3 * number : 3 * number + 2]
                of_weight.calibrate(weight)
            fuses = self.fuse_wgrad_accumulation and weight.requires_grad
            microbatches = self._microbatches[gemm]
            first = self.note_microbatch(frame, microbatches, is_first_microbatch, fuses=fuses, gemm=number)
            last = updates and gemm == "fc1"  # whose backward ends the module's
            calls.append(self.linear_call(label, frame, of, parts[0], first, updates_backward=last, gemm=number))
            quantized.append(stored)
            calibrates.append(quantizer)
        self.note_forward(frame)
        first_call, second_call = calls
        return LayerNormMLPCall(
            plan.norm,
            first_call,
            plan.activation,
            second_call,
            self.return_layernorm_output,
            (calibrates[0], calibrates[1]),
            leaves_out_fc2=self.checkpoint and frame.again and computes_for_backward(),
        ), (quantized[0], quantized[1])

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}, "
            f"normalization={self.normalization!r}, activation={self.activation!r}"
        )
