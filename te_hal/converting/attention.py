"""nn.MultiheadAttention over te_hal's products and attention; it is called as torch's is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from te_hal.converting.in_projection import InProjection
from te_hal.converting.linear import make_linear
from te_hal.converting.masks import attention_mask, padding_mask, refuse_hint, summed
from te_hal.converting.replacement import reason_against_fp8
from te_hal.modules import DotProductAttention
from te_hal.modules.transforms import run_eagerly
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

    from te_hal.quantization.operand_formats import Formats

_WHERE = "MultiheadAttention"


class MultiheadAttention(torch.nn.Module):
    """Attention with torch's call, parameters and names of parameters, whose products are te_hal's.

    A query that may see no key gets 0 here; torch gives NaN.

    Args:
        old: the module whose place it takes. Its parameters are used as they are.
    """

    #: Keeps torch's own transformer layers from reading the parameters past this forward.
    _qkv_same_embed_dim = False

    def __init__(self, old: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = old.embed_dim, old.num_heads, old.dropout
        self.head_dim, self.batch_first = old.head_dim, old.batch_first
        self.in_proj_weight = old.in_proj_weight
        self.in_proj_bias = old.in_proj_bias
        self.out_proj = make_linear(old.out_proj)
        size, has_bias, dtype = old.embed_dim, old.in_proj_bias is not None, old.in_proj_weight.dtype
        #: By parts: one product where queries, keys and values come from the same tensor, else one each.
        self._products = torch.nn.ModuleDict(
            {parts: InProjection(parts, size, bias=has_bias, dtype=dtype) for parts in ("qkv", "kv", "q", "k", "v")}
        )
        self._bind()
        self.core = DotProductAttention(
            self.num_heads, self.head_dim, attention_dropout=old.dropout, qkv_format="bshd", attn_mask_type="no_mask"
        )
        self.train(old.training)

    def _bind(self) -> None:
        for product in self._products.values():
            product.read_from(self)  # type: ignore[operator] # an InProjection

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()

    @run_eagerly
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend, as ``nn.MultiheadAttention`` does.

        Args:
            query: ``[L, N, E]``, ``[N, L, E]`` with batch_first, or ``[L, E]``.
            key: the same with S for L.
            value: as ``key``.
            key_padding_mask: ``[N, S]`` or ``[S]``, bool (True hides) or added to the scores.
            need_weights: return the weights as well, which has every score written out.
            attn_mask: ``[L, S]`` or ``[N * heads, L, S]``, bool (True hides) or added to the scores.
            average_attn_weights: over the heads.
            is_causal: a hint that ``attn_mask`` is the causal one; it is not read, the mask is.

        Returns:
            The result in query's shape; the weights ``[N, L, S]`` (per head ``[N, heads, L, S]``) or None.

        Raises:
            ArgumentError: shapes that do not fit; a mask of another dtype; ``is_causal`` without a mask.
        """
        refuse_hint(_WHERE, "attn_mask", attn_mask, is_causal=is_causal)
        batched = query.dim() == 3  # noqa: PLR2004 - else one sequence
        self._check_shapes(query, key, value)
        given = {id(x): self._to_batch(x, batched=batched) for x in (query, key, value)}  # what is one stays one
        queries, keys, values = (self._heads(x) for x in self._project(*(given[id(x)] for x in (query, key, value))))
        bias = _added(key_padding_mask, attn_mask, queries, keys)
        if need_weights:
            result, weights = self._written_out(queries, keys, values, bias)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            result, weights = self._attend(queries, keys, values, bias), None
        result = self.out_proj(result)
        if not batched:
            return result[0], weights
        return (result if self.batch_first else result.transpose(0, 1)), weights

    def _check_shapes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        alike = key.shape == value.shape and key.dim() == query.dim() in (2, 3)
        batch = 0 if self.batch_first else 1
        if alike and (query.dim() == 2 or query.shape[batch] == key.shape[batch]):  # noqa: PLR2004 - one sequence
            return
        lead = "N, L" if self.batch_first else "L, N"
        raise ArgumentError(
            _WHERE,
            got=f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]}",
            accepted=f"[{lead}, {self.embed_dim}] each, or [L, {self.embed_dim}]; one N, and a value for each key",
            todo="correct them",
        )

    def _to_batch(self, x: torch.Tensor, *, batched: bool) -> torch.Tensor:
        """``[N, L, E]``."""
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1).contiguous()

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if query is key is value:
            queries, keys, values = self._products["qkv"](query).chunk(3, -1)
        elif key is value:
            queries = self._products["q"](query)
            keys, values = self._products["kv"](key).chunk(2, -1)
        else:
            queries, keys, values = (self._products[p](x) for p, x in zip("qkv", (query, key, value), strict=True))
        return queries, keys, values

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``[N, L, E]``."""
        if bias is None:
            result: torch.Tensor = self.core(queries, keys, values)
        elif bias.dtype == torch.bool:
            result = self.core(queries, keys, values, bias, attn_mask_type="arbitrary")
        else:
            result = self._written_out(queries, keys, values, bias)[0]
        return result

    def _written_out(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result ``[N, L, E]`` and the weights ``[N, heads, L, S]``."""
        scores = torch.einsum("nlhd,nshd->nhls", queries, keys) / math.sqrt(self.head_dim)
        if bias is not None:
            scores = scores.masked_fill(bias, -math.inf) if bias.dtype == torch.bool else scores + bias.to(scores.dtype)
        hidden = (scores == -math.inf).all(-1, keepdim=True)
        weights = functional.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
        dropped = functional.dropout(weights, self.dropout, training=self.training)
        result = torch.einsum("nhls,nshd->nlhd", dropped, values)
        return result.flatten(-2), dropped


def attention(old: nn.MultiheadAttention, formats: Formats) -> MultiheadAttention | str:
    """The counterpart, or why there is none."""
    reason = difference_of_attention(old) or reason_against_fp8(tuple(old.out_proj.weight.shape), formats)
    return reason or MultiheadAttention(old)


def difference_of_attention(old: nn.MultiheadAttention) -> str | None:
    """What te_hal's attention would compute otherwise."""
    if not old._qkv_same_embed_dim:  # noqa: SLF001 - torch has no other word for separate weights
        return "its keys or values have sizes of their own (kdim, vdim)"
    if old.bias_k is not None or old.bias_v is not None or old.add_zero_attn:
        return "it adds a key of its own (add_bias_kv, add_zero_attn)"
    return None


def _added(
    padding: torch.Tensor | None, mask: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Both masks as one that broadcasts to ``[N, heads, L, S]``: bool where both are, else what is added.

    Raises:
        ArgumentError: one does not fit.
    """
    batch, length, heads = queries.shape[:3]
    given = []
    if padding is not None:
        given.append(padding_mask(f"{_WHERE}: key_padding_mask", padding, batch, keys.shape[1]))
    if mask is not None:
        given.append(attention_mask(f"{_WHERE}: attn_mask", mask, (batch, heads, length, keys.shape[1])))
    return summed(given)
