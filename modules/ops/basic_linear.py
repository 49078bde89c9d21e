"""BasicLinear: y = x @ weight.T, in FP8 under autocast, with the neighbours that run with it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.modules.activation_stage import casts_gradient
from te_hal.modules.arguments import REASONS, check_callable, check_dtype, check_size
from te_hal.modules.device import first_reset, make_real, parameter_device
from te_hal.modules.fp8_module import Fp8Module
from te_hal.modules.gemm_parameters import GemmParameters
from te_hal.modules.main_grad import Microbatches, main_grad_dtype
from te_hal.modules.ops.chain_function import LinkCall
from te_hal.modules.ops.link import Link
from te_hal.modules.ops.link_operands import Prepared, operands_of
from te_hal.modules.ops.link_plan import LinkKey, make_link_plan
from te_hal.modules.ops.operation import BasicOperation, Part
from te_hal.modules.ops.run import run_chain
from te_hal.modules.plan_cache import PlanCache
from te_hal.modules.plan_key import plan_key
from te_hal.modules.recompute import recomputable
from te_hal.modules.rng_tracker import forked
from te_hal.modules.shape_rule import check_fp8_shape
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization.autocast import current_frame
from te_hal.schema.flags import check_flags
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.modules.ops.link_operands import Operands, Place
    from te_hal.modules.ops.link_plan import LinkPlan
    from te_hal.quantization import Quantizer
    from te_hal.quantization.autocast import Frame
    from te_hal.quantization.operand_formats import Formats

_REFUSED = declare(
    "ops.BasicLinear",
    {
        "tensor_parallel_mode": None,
        "tensor_parallel_group": None,
        "sequence_parallel": False,
        "userbuffers_options": None,
    },
    REASONS,
)

#: As torch.nn.Linear initialises its weight.
KAIMING = partial(torch.nn.init.kaiming_uniform_, a=math.sqrt(5))

_SLOTS = {"forward": ("scaling_fwd", 2), "backward": ("scaling_bwd", 1)}


class BasicLinear(Fp8Module, BasicOperation):
    """A linear layer without bias. Weights start as torch.nn.Linear's do.

    Args:
        in_features: size of the input's last dimension; divisible by 16 for FP8.
        out_features: size of the output's last dimension; divisible by 8 for FP8 (16 for a layer that follows).
        device: None: the current backend's.
        dtype: of the weight; None: torch's default dtype.
        rng_state_tracker_function: gives the RNG tracker under whose fork the weight is initialised; None: outside of
            any.
        accumulate_into_main_grad: add the weight gradient to ``weight.main_grad`` (see te_hal.modules.main_grad).
        tensor_parallel_mode, tensor_parallel_group, sequence_parallel, userbuffers_options: of later features;
            anything but the default is refused by name.

    Raises:
        UnsupportedError: an argument of a later feature.
        ArgumentError: sizes that are no positive ints; a flag that is no bool; a dtype that no gemm takes; no device.
    """

    takes_backward_override = True
    part: ClassVar[Part | None] = Part.PRODUCT

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: object = None,
    ) -> None:
        kind = "BasicLinear"
        refuse(kind, locals(), _REFUSED)
        check_flags(kind, {"accumulate_into_main_grad": accumulate_into_main_grad})
        check_callable(f"{kind}: rng_state_tracker_function", rng_state_tracker_function)
        super().__init__(None, PlanCache(make_link_plan))
        self.in_features = check_size(f"{kind}: in_features", in_features)
        self.out_features = check_size(f"{kind}: out_features", out_features)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = rng_state_tracker_function
        self._gemm = GemmParameters(in_features, {"": out_features}, bias=False)
        self._microbatches = Microbatches()
        chosen, place = check_dtype(f"{kind}: dtype", dtype), parameter_device(device, f"{kind}: device")
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=chosen, device=place))
        first_reset(self)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Uniform between plus and minus 1 / sqrt(in_features), in place.

        Args:
            defer_init: parameters on ``meta`` stay there. Otherwise they get memory on the current backend's device.
        """
        make_real(self, wait=defer_init)
        with forked(self._rng_state_tracker_function):
            self._gemm.fill(self, KAIMING)

    def num_quantizers(self, mode: str) -> int:
        """How many quantizers a direction has: 2 ("forward": input, weight), 1 ("backward": grad_output)."""
        return _SLOTS[mode][1]

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        """A quantizer in use; None before the first forward in FP8.

        Args:
            mode: "forward" or "backward".
            index: below :meth:`num_quantizers`.
        """
        key, count = _SLOTS[mode]
        return dict(enumerate(self.quantizers[key][:count]))[index] if self.fp8_initialized else None

    @run_eagerly
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input @ weight.T``.

        Args:
            input: ``[..., in_features]``; plain, or a Float8Tensor.

        Returns:
            ``[..., out_features]`` in the activation dtype.

        Raises:
            ArgumentTypeError: the input is no tensor.
            ArgumentError: shapes, dtypes or devices that do not fit; sizes that FP8 cannot take.
            StateError: under ``accumulate_into_main_grad``, a weight without a ``main_grad`` that fits.
            UnsupportedError: the backend lacks the recipe; an FP8 forward inside a backward, by a hook.
        """
        return run_chain((Link(None, self, None, None),), input, None)

    @run_eagerly
    @recomputable
    def prepare(self, link: Link, place: Place, *, activation_follows: bool) -> Prepared:
        """Decide what a link with this product runs, quantize its weight, and note it in the scaling state.

        Args:
            link: the product and its neighbours.
            place: in the chain.
            activation_follows: the next link begins with an activation, whose backward may quantize its gradient.

        Raises:
            As :meth:`forward`.
        """
        frame, label = current_frame(), self.label
        operands = operands_of(link, place, frame, self._gemm.read(self, label))
        formats = self.formats(frame, place.input.device)
        if formats is not None:
            check_fp8_shape(label, "input", (*place.shape[:-1], self.in_features), formats)
            names = ("out_features", "in_features")
            check_fp8_shape(label, "weight", (self.out_features, self.in_features), formats, names)
        fuses = self.accumulate_into_main_grad and operands.weight.requires_grad
        main_grad = main_grad_dtype(label, self.weight) if fuses and torch.is_grad_enabled() else None
        key = self._key(link, place, operands, formats, main_grad, activation_follows=activation_follows)
        plan: LinkPlan = self._plans.get(key)
        self.begin_forward(frame, place.input.device, plan.linear.order)
        quantized, calibrates = self._cast_weight_of(frame, operands, plan)
        first = self.note_microbatch(frame, self._microbatches, None, fuses=fuses)
        self.note_forward(frame)
        of_linear = key.linear
        linear = self.linear_call(
            label, frame, plan.linear, self.weight, first, updates_backward=of_linear.dgrad or of_linear.wgrad
        )
        _note_joined(link)
        after = operands.place_after(place, self.out_features, of_linear)
        return Prepared(LinkCall(plan, linear, calibrates), operands, quantized, after)

    def _key(
        self,
        link: Link,
        place: Place,
        operands: Operands,
        formats: Formats | None,
        main_grad: torch.dtype | None,
        *,
        activation_follows: bool,
    ) -> LinkKey:
        separate = link.add is not None
        bias = operands.bias
        linear = plan_key(
            formats,
            operands.input,
            operands.weight,
            None if separate else bias,
            needs_dgrad=operands.needs_dgrad,
            input_is_quantized=link.front is not None,
            main_grad_dtype=main_grad,
        )
        if separate:
            linear = linear._replace(bias_grad=torch.is_grad_enabled() and bias is not None and bias.requires_grad)
        if activation_follows:
            linear = linear._replace(grad_is_quantized=casts_gradient(linear.format_of("grad_output")))
        before = place.before if link.front is not None and link.front.quantizes_gradient else None
        return LinkKey(operands.front_key, before, linear, separate and bias is not None)

    def _cast_weight_of(self, frame: Frame, operands: Operands, plan: LinkPlan) -> tuple[Any, Quantizer | None]:
        """The weight that the gemms read under FP8; what records the input's amax while calibrating."""
        if frame.enabled:
            weight = operands.weight.detach()
            return self.quantized_weight(frame, "weight", [self.weight], weight, plan.linear, None), None
        if not frame.calibrating:
            return None, None
        of_input, of_weight = self.quantizers["scaling_fwd"][:2]
        of_weight.calibrate(operands.weight)
        return None, of_input

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _note_joined(link: Link) -> None:
    """For te_hal.explain: which of the ops around it the product ran with."""
    for op, sentence in (
        (link.front, "runs with the BasicLinear behind it"),
        (link.bias, "added by the BasicLinear before it"),
        (link.add, "added behind the BasicLinear before it"),
    ):
        if op is not None and op.joined is not sentence:  # torch's __setattr__ costs a microsecond
            op.joined = sentence
