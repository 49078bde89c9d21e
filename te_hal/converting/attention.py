"""nn.MultiheadAttention over te_hal's products and attention; it is called as torch's is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from te_hal.converting.linear import make_linear
from te_hal.converting.replacement import reason_against_fp8
from te_hal.modules import DotProductAttention, Linear
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

    from te_hal.quantization.operand_formats import Formats


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
            {
                parts: _bare(Linear(size, len(parts) * size, bias=has_bias, params_dtype=dtype, device="meta"))
                for parts in ("qkv", "kv", "q", "k", "v")
            }
        )
        self.core = DotProductAttention(
            self.num_heads, self.head_dim, attention_dropout=old.dropout, qkv_format="bshd", attn_mask_type="no_mask"
        )
        self.train(old.training)

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
            ArgumentError: shapes that do not fit; ``is_causal`` without a mask.
        """
        if is_causal and attn_mask is None:
            raise ArgumentError(
                "MultiheadAttention: is_causal",
                got="True without attn_mask",
                accepted="True as a hint beside the causal attn_mask, as in torch",
                todo="pass attn_mask as well",
            )
        batched = query.dim() == 3  # noqa: PLR2004 - else one sequence
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

    def _to_batch(self, x: torch.Tensor, *, batched: bool) -> torch.Tensor:
        """``[N, L, E]``."""
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1).contiguous()

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if query is key is value:
            queries, keys, values = self._product("qkv", query).chunk(3, -1)
        elif key is value:
            queries = self._product("q", query)
            keys, values = self._product("kv", key).chunk(2, -1)
        else:
            queries, keys, values = (self._product(p, x) for p, x in zip("qkv", (query, key, value), strict=True))
        return queries, keys, values

    def _product(self, parts: str, x: torch.Tensor) -> torch.Tensor:
        """``x`` times the rows of the weight that these parts have."""
        product, size = self._products[parts], self.embed_dim
        rows = slice("qkv".index(parts[0]) * size, ("qkv".index(parts[-1]) + 1) * size)
        held = vars(product)  # past torch, which would register a parameter a second time
        held["weight"] = self.in_proj_weight if parts == "qkv" else self.in_proj_weight[rows]
        if self.in_proj_bias is not None:
            held["bias"] = self.in_proj_bias if parts == "qkv" else self.in_proj_bias[rows]
        result: torch.Tensor = product(x)
        return result

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
    if not old._qkv_same_embed_dim:  # noqa: SLF001 - torch has no other word for separate weights
        return "its keys or values have sizes of their own (kdim, vdim)"
    if old.bias_k is not None or old.bias_v is not None or old.add_zero_attn:
        return "it adds a key of its own (add_bias_kv, add_zero_attn)"
    reason = reason_against_fp8(tuple(old.out_proj.weight.shape), formats)
    return reason or MultiheadAttention(old)


def _bare(product: Linear) -> Linear:
    """Without parameters: it is given what to read before each call."""
    for name in (*product.weight_names, *product.bias_names):
        del product._parameters[name]  # noqa: SLF001 - torch has no other way to leave the name to an attribute
    return product


def _added(
    padding: torch.Tensor | None, mask: torch.Tensor | None, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | None:
    """Both masks as one that broadcasts to ``[N, heads, L, S]``: bool where both are, else what is added."""
    batch, length, heads = queries.shape[:3]
    given = []
    if padding is not None:
        given.append(padding.reshape(-1, 1, 1, keys.shape[1]))
    if mask is not None:
        many = mask.dim() == 3  # noqa: PLR2004 - one per sequence and head
        given.append(mask.reshape(batch, heads, length, -1) if many else mask.reshape(1, 1, length, -1))
    if not given:
        return None
    if all(x.dtype == torch.bool for x in given):
        return given[0] if len(given) == 1 else given[0] | given[1]
    terms = [_as_added(x) for x in given]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _as_added(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
