"""GroupedLinear: a linear layer for each group of consecutive rows, such as the rows of each expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.modules.activation_dtype import activation_dtype, cast_if_needed, plain_input
from te_hal.modules.arguments import REASONS, check_callable, check_dtype, check_size
from te_hal.modules.call_checks import check_call, check_kept_input
from te_hal.modules.caller_buffer import check_buffer
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.gemm_parameters import DEFAULT_INIT, returned_bias
from te_hal.modules.grouped_linear_function import GroupedCall, GroupedLinearFunction
from te_hal.modules.grouped_parameters import GroupedParameters
from te_hal.modules.grouped_splits import checked_splits
from te_hal.modules.main_grad import Microbatches, main_grad_dtype
from te_hal.modules.plan import make_plan
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.plan_key import plan_key
from te_hal.modules.recompute import recomputable
from te_hal.modules.rng_tracker import forked
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.autocast import current_frame
from te_hal.quantization.quantizer_role import QuantizerRole
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_hal.modules.grouped_parameters import GroupedRead
    from te_hal.modules.linear_call import LinearCall
    from te_hal.modules.linear_steps import Operand
    from te_hal.modules.plan import LinearPlan
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.operand_formats import Formats
    from te_hal.quantization.quantizer_role import SlotRoles

_REFUSED = declare(
    "GroupedLinear",
    {
        "sequence_parallel": False,
        "tp_group": None,
        "tp_size": 1,
        "parallel_mode": None,
        "ub_overlap_rs": False,
        "ub_overlap_ag": False,
        "ub_name": None,
    },
    REASONS,
)
_REFUSED_BUT_FALSE = declare(
    "GroupedLinear",
    {"use_grouped_tensor": None},
    {"use_grouped_tensor": "the products of groups are taken one by one, on tensors of their own; False says so, too"},
)


class GroupedLinear(Fp8Module):
    """Linear layers of one shape over consecutive groups of rows, with Transformer Engine's arguments and names.

    Under FP8 every group has its own scaling state: rows of one expert don't scale those of another. A group without
    rows computes nothing and records nothing of an input; its weight is quantized as ever.

    Args:
        num_gemms: number of groups.
        in_features: size of the input's last dimension; divisible by 16 for FP8.
        out_features: size of the output's last dimension; divisible by 8 for FP8.
        fuse_wgrad_accumulation: put weight gradients into ``main_grad`` (see te_hal.modules.main_grad).
        get_rng_state_tracker: gives the RNG tracker under whose fork weights are initialised; None: outside of any.
        rng_tracker_name: of that fork; None: the tracker's default.
        init_method: called with each weight to fill it in place; None: normal, mean 0, deviation 0.023.
        bias: have biases, which start at 0.
        return_bias: do not add the biases but return ``(output, biases)``.
        params_dtype: dtype of the parameters; None: torch's default dtype.
        device: None: the current backend's.
        save_original_input: keep the unquantized input for backward and quantize it again there. Without effect under a
            recipe with a ``backward_override``, which says what is kept.
        single_grouped_weight: one parameter ``weight [num_gemms, out_features, in_features]`` in place of ``weight0``,
            ``weight1``, ...
        single_grouped_bias: one parameter ``bias [num_gemms, out_features]`` in place of ``bias0``, ``bias1``, ...
        delay_wgrad_compute: the backward leaves the weight gradients to :meth:`backward_dw`.
        name: for messages.
        use_grouped_tensor: None or False; True, one kernel over all products, is refused by name.
        sequence_parallel, tp_group, tp_size, parallel_mode, ub_overlap_rs, ub_overlap_ag, ub_name: of later features;
            anything but the default is refused by name.

    Raises:
        UnsupportedError: an argument of a later feature; a stacked weight inside ``quantized_model_init``.
        ArgumentError: sizes that are no positive ints; a flag that is no bool; a dtype that no gemm takes; no device.
    """

    takes_backward_override = True

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        kind = "GroupedLinear"
        refuse(kind, locals(), _REFUSED)
        if use_grouped_tensor is not False:
            refuse(kind, {"use_grouped_tensor": use_grouped_tensor}, _REFUSED_BUT_FALSE)
        flags = {
            "delay_wgrad_compute": delay_wgrad_compute,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias": bias,
            "return_bias": return_bias,
            "save_original_input": save_original_input,
            "single_grouped_weight": single_grouped_weight,
            "single_grouped_bias": single_grouped_bias,
        }
        check_flags(kind, flags)
        check_callable(f"{kind}: init_method", init_method)
        check_callable(f"{kind}: get_rng_state_tracker", get_rng_state_tracker)
        # Scaling state has slots for every group, so the base class is made for them.
        self.num_gemms = check_size(f"{kind}: num_gemms", num_gemms)  # type: ignore[misc] # elsewhere of the class
        self.gemm_names = tuple(map(str, range(num_gemms)))  # type: ignore[misc]
        super().__init__(name, PlanCache(make_plan))
        self.in_features = check_size(f"{kind}: in_features", in_features)
        self.out_features = check_size(f"{kind}: out_features", out_features)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.init_method = init_method or DEFAULT_INIT
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        shape = (out_features, in_features)
        self._parameters_of = GroupedParameters(
            num_gemms, shape, bias=bias, single_weight=single_grouped_weight, single_bias=single_grouped_bias
        )
        self._microbatches = tuple(Microbatches() for _ in range(num_gemms))
        dtype = check_dtype(f"{kind}: params_dtype", params_dtype)
        self._parameters_of.register(self, dtype, parameter_device(device, f"{kind}: device"))
        first_reset(self)
        if delay_wgrad_compute:
            self.delay_wgrads(self._parameters_of.targets())

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights, in order; one where they are stacked."""
        return self._parameters_of.weight_names

    @property
    def bias_names(self) -> list[str]:
        """Names of the biases, in order; none without a bias."""
        return self._parameters_of.bias_names

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise weights by ``init_method`` and biases to 0, in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        with forked(self.get_rng_state_tracker, self.rng_tracker_name):
            self._parameters_of.fill(self, self.init_method)

    def quantizer_roles(self) -> dict[str, SlotRoles]:
        """What a CustomRecipe's factory is asked about: the same for every group."""
        kind, name = "grouped_linear", self.name or ""
        forward = (
            QuantizerRole(kind, "input", name),
            QuantizerRole(kind, "weight", name),
            self.output_quantizer_role,
        )
        backward = (QuantizerRole(kind, "grad_output", name), self.grad_input_quantizer_role)
        return {"scaling_fwd": forward * self.num_gemms, "scaling_bwd": backward * self.num_gemms}

    @run_eagerly
    @recomputable
    def forward(
        self,
        inp: torch.Tensor,
        m_splits: Sequence[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> Any:  # noqa: ANN401 - a tensor, or with return_bias a pair
        """Apply to each group of rows its layer.

        Args:
            inp: ``[..., in_features]``; a quantized one is dequantized.
            m_splits: ``num_gemms`` row counts, a sequence of ints or a tensor of integers (which is waited for where
                it lies on a device). 0: no rows. Rows beyond their sum belong to no group.
            is_first_microbatch: as in Linear, for every weight.
            out: ``[rows, out_features]`` in the activation dtype, contiguous, without gradient: is written in place
                and returned; rows of no group stay as they are.
            dgrad_out: ``[rows, in_features]``, likewise, for the gradient of the input.

        Returns:
            ``[..., out_features]`` in the activation dtype, 0 in rows of no group; with ``return_bias`` the pair of
            this and the biases: a list, or the stacked parameter in the activation dtype.

        Raises:
            ArgumentTypeError: the input is no tensor; ``m_splits`` neither of these.
            ArgumentError: shapes, splits, dtypes or devices that do not fit; sizes that FP8 cannot take.
            StateError: under ``fuse_wgrad_accumulation``, a weight without a ``main_grad`` that fits.
            UnsupportedError: the backend lacks the recipe; an FP8 forward inside a backward.
        """
        frame, label = current_frame(), self.label
        check_call(self, inp, ("in_features", self.in_features), is_first_microbatch, frame)
        rows = inp.numel() // self.in_features
        splits = checked_splits(label, m_splits, self.num_gemms, rows)
        formats = self._formats_by_product(frame, inp.device)
        self._check_fp8(label, splits, formats)
        read = self._parameters_of.read(self, label)
        given = dict(zip(self.weight_names, read.parameters, strict=False))
        given |= {name: getattr(self, name) for name in self.bias_names}
        dtype = activation_dtype(label, inp, **given)
        for name, buffer, features in (("out", out, self.out_features), ("dgrad_out", dgrad_out, self.in_features)):
            check_buffer(f"{label}: {name}", buffer, (rows, features), dtype, inp.device)
        inp = plain_input(inp, dtype)
        weights = [cast_if_needed(weight, dtype) for weight in read.weights]
        biases = [cast_if_needed(bias, dtype) for bias in read.biases]
        added = [] if self.return_bias else biases
        plans = self._plans_by_product(label, inp, formats, read, weights, added)
        self.begin_forward(frame, inp.device, plans[0].order)
        if frame.calibrating and not frame.enabled:
            self._calibrate(inp, splits, weights)
        quantized = self._quantized(frame, read, weights, plans, is_first_microbatch) if frame.enabled else None
        self.note_forward(frame)
        products = self._products(label, frame, plans, read, is_first_microbatch)
        call = GroupedCall(products, splits, self.single_grouped_weight, dgrad_out)
        output = GroupedLinearFunction.apply(inp, out, quantized, call, *weights, *added)  # type: ignore[no-untyped-call]
        return (output, self._returned_biases(biases, dtype, inp.device)) if self.return_bias else output

    def _formats_by_product(self, frame: Frame, device: torch.device) -> list[Formats | None]:
        """What the operands become, by group; a CustomRecipe's factory may answer differently for each."""
        if frame.enabled and frame.recipe is not None and frame.recipe.custom():
            return [self.formats(frame, device, gemm) for gemm in range(self.num_gemms)]
        return [self.formats(frame, device)] * self.num_gemms

    def _check_fp8(self, label: str, splits: Sequence[int], formats: Sequence[Formats | None]) -> None:
        names = ("out_features", "in_features")
        for number, (rows, of) in enumerate(zip(splits, formats, strict=True)):
            if of is None:
                continue
            check_fp8_shape(label, f"weight of group {number}", (self.out_features, self.in_features), of, names)
            rows_of = (f"m_splits[{number}] (te.Fp8Padding pads them)", "in_features")
            check_fp8_shape(label, f"input of group {number}", (rows, self.in_features), of, rows_of)
            if self.save_original_input:
                check_kept_input(label, of)

    def _plans_by_product(
        self,
        label: str,
        inp: torch.Tensor,
        formats: Sequence[Formats | None],
        read: GroupedRead,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> list[LinearPlan]:
        """The plan of each group: one for all of them, unless some are frozen or quantized otherwise."""
        made: dict[object, LinearPlan] = {}
        plans = []
        fuses = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        for number, (of, weight) in enumerate(zip(formats, weights, strict=True)):
            bias = biases[number] if biases else None
            main_grad = None
            if fuses and weight.requires_grad:
                main_grad = main_grad_dtype(label, read.parameters[number])
            what = (of, weight.requires_grad, bias is not None and bias.requires_grad, main_grad)
            if what not in made:
                key = plan_key(
                    of,
                    inp,
                    weight,
                    bias,
                    main_grad_dtype=main_grad,
                    keeps_original_input=self.save_original_input,
                    writes_into=True,
                )
                made[what] = self._plans.get(key)
            plans.append(made[what])
        return plans

    def _calibrate(self, inp: torch.Tensor, splits: Sequence[int], weights: Sequence[torch.Tensor]) -> None:
        rows, start = inp.reshape(-1, self.in_features), 0
        for number, (size, weight) in enumerate(zip(splits, weights, strict=True)):
            if size:
                self.calibrate(rows[start : start + size], weight, gemm=number)
            else:
                self.quantizers["scaling_fwd"][3 * number + 1].calibrate(weight)
            start += size

    def _quantized(
        self,
        frame: Frame,
        read: GroupedRead,
        weights: Sequence[torch.Tensor],
        plans: Sequence[LinearPlan],
        is_first_microbatch: bool | None,
    ) -> list[Operand]:
        return [
            self.quantized_weight(
                frame, f"weight{number}", [read.parameters[number]], weight.detach(), plan, is_first_microbatch, number
            )
            for number, (weight, plan) in enumerate(zip(weights, plans, strict=True))
        ]

    def _products(
        self,
        label: str,
        frame: Frame,
        plans: Sequence[LinearPlan],
        read: GroupedRead,
        is_first_microbatch: bool | None,
    ) -> tuple[LinearCall, ...]:
        updates = any(plan.key.dgrad or plan.key.wgrad for plan in plans)
        products = []
        for number, plan in enumerate(plans):
            parameter, microbatches = read.parameters[number], self._microbatches[number]
            fuses = self.fuse_wgrad_accumulation and parameter.requires_grad
            first = self.note_microbatch(frame, microbatches, is_first_microbatch, fuses=fuses, gemm=number)
            ends = updates and number == 0  # whose call ends the module's backward
            products.append(self.linear_call(label, frame, plan, parameter, first, updates_backward=ends, gemm=number))
        return tuple(products)

    def _returned_biases(
        self, biases: list[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor | list[torch.Tensor]:
        if not self.use_bias:
            return [returned_bias(None, dtype, device) for _ in range(self.num_gemms)]
        return cast_if_needed(self.get_parameter("bias"), dtype) if self.single_grouped_bias else biases

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}"
        )
