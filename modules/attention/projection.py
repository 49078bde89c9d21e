"""From hidden states to queries, keys and values: how one projection's output is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from te_hal.modules.attention.cut import cut

if TYPE_CHECKING:
    import torch


class HeadLayout(NamedTuple):
    """Heads of a module and how its fused projections lay them out.

    Attributes:
        heads: of queries.
        groups: of keys and values.
        channels: of each.
        interleaved: a fused output holds, group after group, the group's queries, its key and its value; else all
            queries, then all keys, then all values.
    """

    heads: int
    groups: int
    channels: int
    interleaved: bool

    @property
    def query_size(self) -> int:
        """Rows of the weight that gives queries."""
        return self.heads * self.channels

    @property
    def key_size(self) -> int:
        """Rows of the weight that gives keys; that of values has as many."""
        return self.groups * self.channels

    def query_key_value(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[..., query_size + 2 * key_size]`` as ``[..., heads, channels]`` and twice ``[..., groups, channels]``."""
        if not self.interleaved:
            query, key, value = cut(mixed, [self.query_size, self.key_size, self.key_size], -1)
            return self._heads(query), self._heads(key), self._heads(value)
        each = self.heads // self.groups
        grouped = mixed.reshape(*mixed.shape[:-1], self.groups, each + 2, self.channels)
        query, key, value = cut(grouped, [each, 1, 1], -2)
        return query.flatten(-3, -2), key.flatten(-3, -2), value.flatten(-3, -2)

    def key_value(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[..., 2 * key_size]`` as twice ``[..., groups, channels]``."""
        if not self.interleaved:
            key, value = cut(mixed, [self.key_size, self.key_size], -1)
            return self._heads(key), self._heads(value)
        grouped = mixed.reshape(*mixed.shape[:-1], self.groups, 2 * self.channels)
        key, value = cut(grouped, [self.channels, self.channels], -1)
        return key, value

    def query(self, projected: torch.Tensor) -> torch.Tensor:
        """``[..., query_size]`` as ``[..., heads, channels]``."""
        return self._heads(projected)

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.reshape(*projected.shape[:-1], projected.shape[-1] // self.channels, self.channels)
