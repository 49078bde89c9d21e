"""Checkpoint manners shared by all modules: plain torch weights load strictly, extra state is always a tensor."""

from __future__ import annotations

from typing import Any

import torch

from te_hal.quantization import extra_state
from te_hal.schema.errors import CheckpointError

_SUFFIX = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX  # noqa: SLF001 - torch's name for the key


class OptionalExtraState(torch.nn.Module):
    """Mixin: ``_extra_state`` is a CPU uint8 tensor, and a state dict without it loads strictly.

    Weights that come without it, from ``torch.nn.Linear`` for example, start scaling state anew. The other way round,
    drop the keys that end in ``_extra_state``: the rest is what the torch.nn module of that name has.
    """

    def get_extra_state(self) -> torch.Tensor:
        """No state: a uint8 tensor of no elements."""
        return extra_state.empty()

    def set_extra_state(self, state: object) -> None:
        """Accept an empty state.

        Raises:
            CheckpointError: the entry holds something, which belongs to another module.
        """
        if state is not None and extra_state.unpack(state, type(self).__name__) is not None:
            raise CheckpointError(
                f"{type(self).__name__}: _extra_state",
                got="scaling state",
                accepted="an empty entry: this module has none",
                todo="load a checkpoint of the same model",
            )

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
        if key in state_dict:
            self._check_extra_state(key, state_dict[key])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:
            missing_keys.remove(key)
        # A bias alone says nothing about the magnitudes that scales were made for.
        names = (prefix + name for name, _ in self.named_parameters(recurse=False) if name.endswith("weight"))
        if key not in state_dict and any(name in state_dict for name in names):
            self.set_extra_state(None)

    def _check_extra_state(self, key: str, state: object) -> None:
        """Take the state over before any weight is copied, so that a refusal leaves the weights, and name its key."""
        try:
            self.set_extra_state(state)
        except CheckpointError as error:
            where = f"{error.where} (key {key!r})"
            raise CheckpointError(where, got=error.got, accepted=error.accepted, todo=error.todo) from error
