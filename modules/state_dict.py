"""Checkpoint manners shared by all modules: plain torch weights load strictly, extra state is always a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_hal.quantization import extra_state
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUFFIX = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX  # noqa: SLF001 - torch's name for the key


class OptionalExtraState(torch.nn.Module):
    """Mixin: ``_extra_state`` is a CPU uint8 tensor, and a state dict without it loads strictly.

    Weights that come without it, from ``torch.nn.Linear`` for example, start scaling state anew. The other way round,
    drop the keys that end in ``_extra_state``: the rest is what the torch.nn module of that name has.

    Attributes:
        former_extra_states: keys below the module's own under which older checkpoints have its state.
    """

    former_extra_states: ClassVar[tuple[str, ...]] = ()

    def get_extra_state(self) -> torch.Tensor:
        """No state: a uint8 tensor of no elements."""
        return extra_state.empty()

    def check_extra_state(self, state: object) -> None:
        """Refuse what :meth:`set_extra_state` would refuse, and change nothing.

        Raises:
            CheckpointError: the entry holds values, which belong to another module. Where nothing was ever recorded
                (Transformer Engine's attention without FP8), there is nothing to lose, and no refusal.
        """
        saved = None if state is None else extra_state.unpack(state, type(self).__name__)
        if saved is not None and not _is_untouched(saved.arrays):
            raise CheckpointError(
                f"{type(self).__name__}: _extra_state",
                got="scaling state",
                accepted="an empty entry, or one in which nothing was recorded: this module has no state",
                todo="load a checkpoint of the same model, or remove the entry",
            )

    def set_extra_state(self, state: object) -> None:
        """Accept a state of no values.

        Raises:
            CheckpointError: as :meth:`check_extra_state`.
        """
        self.check_extra_state(state)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + _SUFFIX
        check_extra_states(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:
            missing_keys.remove(key)
        for former in self.former_extra_states:
            if prefix + former in unexpected_keys:
                self.check_extra_state(state_dict[prefix + former])
                unexpected_keys.remove(prefix + former)
        # A bias alone says nothing about the magnitudes that scales were made for.
        names = (prefix + name for name, _ in self.named_parameters(recurse=False) if name.endswith("weight"))
        if key not in state_dict and any(name in state_dict for name in names):
            self.set_extra_state(None)


def check_extra_states(model: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a checkpoint whose extra states do not fit, and change nothing.

    ``load_state_dict`` goes from module to module, and each te_hal module checks itself and all below it first. A
    model of your own around several of them is left as it was only if this is called before.

    Args:
        model: any module.
        state_dict: what ``model.load_state_dict`` would get.
        prefix: of the model's keys.

    Raises:
        CheckpointError: naming module and key of the first one.
    """
    for path, module in model.named_modules():
        key = f"{prefix}{path}.{_SUFFIX}" if path else prefix + _SUFFIX
        if not isinstance(module, OptionalExtraState) or key not in state_dict:
            continue
        try:
            module.check_extra_state(state_dict[key])
        except CheckpointError as error:
            where = f"{error.where} (key {key!r})"
            raise CheckpointError(where, got=error.got, accepted=error.accepted, todo=error.todo) from error


def _is_untouched(arrays: Mapping[str, torch.Tensor]) -> bool:
    """Whether scales and histories are there and all as they start: 1 and 0."""
    return bool(arrays) and all(bool((a == float(name.startswith("scale"))).all()) for name, a in arrays.items())
