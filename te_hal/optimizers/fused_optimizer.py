"""FusedOptimizer: what both optimizers share: master weights, state in fewer bits, and exact hand-over of state."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.optimizers.main_grads import warn_of_main_grads
from te_hal.optimizers.parameters import (
    check_parameter,
    chunks,
    fp32_value,
    gradient_of,
    join_master,
    split_master,
    write,
)
from te_hal.optimizers.scaled_state import decode, encode, is_scaled
from te_hal.optimizers.state_check import check_layout, check_state
from te_hal.schema.errors import ArgumentError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim.optimizer import ParamsT, StateDict

MASTER = "master_param"


def scale_name(name: str) -> str:
    """The key of a state's scale."""
    return f"{name}_scale_inv"


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is kept per parameter under names, each in a dtype of its own.

    Args:
        params: as for any optimizer: fp32, bf16, fp16, or quantized with one of these as nominal dtype.
        defaults: per-group settings.
        dtypes: of the states, by name; ``master_param`` among them where master weights are kept.
        remainders: keep, for bf16 parameters, the 16 bits that are missing from them instead of a whole master.
        attribute: of a parameter, where its gradient stands.

    Attributes:
        told: whether the warning of a main_grad that no step reads has been given.
    """

    #: Settings that every group saved by this optimizer or its namesakes has.
    saved_settings: ClassVar[tuple[str, ...]] = ()
    told = False

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        dtypes: dict[str, torch.dtype],
        *,
        remainders: bool = False,
        attribute: str = "grad",
    ) -> None:
        self.dtypes = dtypes
        self.remainders = remainders
        self.attribute = attribute
        self.settings = tuple(defaults)  # torch adds to defaults when it loads
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in any optimizer.

        Raises:
            ArgumentError: a parameter of another dtype, a value out of its range; no group is added then.
        """
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_parameter(type(self).__name__, parameter)
        except ArgumentError:
            del self.param_groups[-1]
            raise

    @abc.abstractmethod
    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse settings that cannot be, or that another optimizer saved and this one does not have.

        Raises:
            ArgumentError: naming the first one.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient, in place.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            ArgumentError: a sparse gradient, or one of another shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        where = type(self).__name__
        for number, group in enumerate(self.param_groups):
            self.check_group(group)
            found = {p: gradient_of(where, p, self.attribute) for p in group["params"]}
            self.told = self.told or warn_of_main_grads(where, number, group, found, self.state, self.attribute)
            gradients = {p: gradient for p, gradient in found.items() if gradient is not None}
            self._count_step(group)
            for chunk in chunks(list(gradients)):
                self._step_chunk(group, chunk, [gradients[parameter] for parameter in chunk])
        return loss

    def _count_step(self, group: dict[str, Any]) -> None:
        """Note that a step of the group is under way, where its formulas need to know."""

    @abc.abstractmethod
    def _step_chunk(self, group: dict[str, Any], parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Step parameters of one device; their gradients are fp32."""

    def has_master(self, parameter: torch.Tensor) -> bool:
        """Whether a master weight is kept beside it: fp32 parameters are their own."""
        return MASTER in self.dtypes and (parameter.dtype != torch.float32 or hasattr(parameter, "quantized_storage"))

    def has_remainder(self, parameter: torch.Tensor) -> bool:
        """Whether the master is the parameter and the 16 bits that are missing from it."""
        plain = parameter.dtype == torch.bfloat16 and not hasattr(parameter, "quantized_storage")
        return self.remainders and plain and self.has_master(parameter)

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store values as one state of a parameter, in the dtype of that state.

        Args:
            param: whose.
            state_name: e.g. ``"exp_avg"`` or ``"master_param"``.
            unscaled_state: fp32, of the parameter's shape; not kept but copied.

        Raises:
            UnknownNameError: no such state is kept.
        """
        self._check_name(param, state_name)
        self._store(param, state_name, unscaled_state.detach().to(param.device, torch.float32, copy=True))

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """One state of a parameter in fp32; its own memory where it is kept in fp32.

        Raises:
            UnknownNameError: no such state is kept, or none yet.
        """
        self._check_name(param, state_name)
        state = self.state[param]
        if state_name not in state:
            raise UnknownNameError(
                f"{type(self).__name__}.get_unscaled_state",
                got=f"{state_name!r} before the first step",
                accepted="a parameter that has been stepped or initialised",
                todo="call step() or initialize_state() first",
            )
        if state_name == MASTER and self.has_remainder(param):
            return join_master(param.detach(), state[MASTER])
        return decode(state[state_name], state.get(scale_name(state_name)))

    def _check_name(self, param: torch.Tensor, name: str) -> None:
        if name not in self.dtypes or (name == MASTER and not self.has_master(param)):
            raise UnknownNameError(
                f"{type(self).__name__}: state_name",
                got=repr(name),
                accepted=", ".join(key for key in self.dtypes if key != MASTER or self.has_master(param)),
                todo="check the spelling; fp32 parameters have no master",
            )

    def _store(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Encode fp32 values, whose memory may be kept."""
        state = self.state[param]
        if name == MASTER and self.has_remainder(param):
            high, state[MASTER] = split_master(values)
            param.detach().copy_(high)
            return
        state[name], scale_inv = encode(values, self.dtypes[name])
        if scale_inv is not None:
            state[scale_name(name)] = scale_inv

    def _start_master(self, param: torch.Tensor) -> None:
        if self.has_master(param) and MASTER not in self.state[param]:
            if self.has_remainder(param):
                self.state[param][MASTER] = torch.zeros_like(param, dtype=torch.int16)
            else:
                self._store(param, MASTER, fp32_value(param))

    @torch.no_grad()
    def refresh_master_weights(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Start masters again from the parameters as they are now, after something else than a step wrote to them.

        Args:
            params: whose; None: of all. A parameter without a master, or not stepped yet, needs nothing.

        Raises:
            ArgumentError: a parameter of another optimizer; no master has changed then.
        """
        own = {id(p): p for group in self.param_groups for p in group["params"]}
        chosen = list(own.values()) if params is None else list(params)
        if any(id(param) not in own for param in chosen):
            raise ArgumentError(
                f"{type(self).__name__}.refresh_master_weights: params",
                got="a parameter that is in no group",
                accepted="parameters of this optimizer",
                todo="pass those, or none for all",
            )
        for param in chosen:
            if self.state.get(param, {}).pop(MASTER, None) is not None:
                self._start_master(param)

    def _value(self, param: torch.Tensor) -> torch.Tensor:
        """The fp32 value that a step starts from."""
        return self.get_unscaled_state(param, MASTER) if self.has_master(param) else fp32_value(param)

    def _finish(self, param: torch.Tensor, values: torch.Tensor) -> None:
        """Take over the fp32 value that a step ended with."""
        if self.has_master(param):
            self._store(param, MASTER, values)
            if self.has_remainder(param):
                return
        write(param, values)

    def state_dict(self) -> StateDict:
        """As in any optimizer; each state in the dtype it is kept in, so that nothing is rounded.

        ``step`` stands in each group, as in Transformer Engine, and beside each parameter's state, as in torch.optim.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if "step" in group:
                for index in group["params"]:
                    if index in saved["state"]:
                        entry = dict(saved["state"][index])
                        saved["state"][index] = {**entry, "step": torch.tensor(float(group["step"]))}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take over a state dict of this class, of Transformer Engine's (fp32 states), or of torch.optim's.

        A state of the dtype it is kept in is copied bit for bit, another one is encoded anew.

        Raises:
            CheckpointError: no state dict, or one of another kind of optimizer; other states, shapes, or numbers of
                steps; nothing has changed then.
            ArgumentError: settings that this optimizer does not have; nothing has changed then.
            ValueError: torch's own, where groups or their sizes differ.
        """
        check_layout(self, state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        given = {
            parameter: state_dict["state"][index]
            for parameter, index in zip(parameters, indices, strict=False)
            if index in state_dict["state"]
        }
        steps = check_state(self, state_dict, given)
        for group in state_dict["param_groups"]:
            self.check_group({**self.defaults, **group})
        super().load_state_dict({**state_dict, "state": {}})
        for group, step in zip(self.param_groups, steps, strict=True):
            for name in self.settings:
                group.setdefault(name, self.defaults[name])
            if step is not None:
                group["step"] = step
        for parameter, entry in given.items():
            for name in self.dtypes:
                if entry.get(name) is not None:
                    self._take_over(parameter, name, entry)

    def _take_over(self, parameter: torch.Tensor, name: str, entry: dict[str, Any]) -> None:
        if name == MASTER and not self.has_master(parameter):
            return
        stored, scale_inv = entry[name], entry.get(scale_name(name))
        dtype = torch.int16 if name == MASTER and self.has_remainder(parameter) else self.dtypes[name]
        if stored.dtype != dtype or (dtype != torch.int16 and is_scaled(dtype) and scale_inv is None):
            self.set_scaled_state(parameter, name, decode(stored, scale_inv))
            return
        state = self.state[parameter]
        state[name] = stored.detach().to(parameter.device, copy=True)
        if scale_inv is not None:
            state[scale_name(name)] = scale_inv.detach().to(parameter.device, copy=True)
