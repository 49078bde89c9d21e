"""What a transformer layer keeps for its backward, by formula, and counted live."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class LayerSize(NamedTuple):
    """Of a pre-norm layer in bf16 with LayerNorm, biases, a plain activation and no dropout.

    Attributes:
        tokens: sequence x batch.
        hidden: features of input and output.
        ffn: features between the products of the MLP.
        heads: of attention.
    """

    tokens: int
    hidden: int
    ffn: int
    heads: int


def activation_bytes(size: LayerSize, *, fp8: bool) -> int:
    """Of Transformer Engine's layer, whose attention keeps its operands, its result and a number per query and head.

    docs/modules.md has the same as a table, tensor by tensor. Without FP8 attention's result is the input of the
    projection after it; under FP8 that has a copy of its own. Queries, keys and values are one tensor.
    """
    operand = 1 if fp8 else 2
    per_token = {
        "inputs of attention and MLP": 2 * 2 * size.hidden,
        "mean and rstd of both norms": 2 * 2 * 4,
        "results of both norms": 2 * operand * size.hidden,
        "queries, keys, values": 3 * 2 * size.hidden,
        "attention's result": 2 * size.hidden,
        "attention's sums": 4 * size.heads,
        "its cast for the projection": size.hidden if fp8 else 0,
        "result of fc1": 2 * size.ffn,
        "input of fc2": operand * size.ffn,
    }
    return size.tokens * sum(per_token.values())


def weight_bytes(size: LayerSize) -> int:
    """Of the copies in FP8 that dgrad reads, one of each weight, and of every scale_inv: a weight's, an operand's."""
    hidden, ffn = size.hidden, size.ffn
    return 3 * hidden * hidden + hidden * hidden + 2 * hidden * ffn + 4 * 2 * 4


def bytes_kept(module: torch.nn.Module, forward: Callable[[], object]) -> int:
    """What autograd keeps of a forward, parameters left out and no memory counted twice."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in kept.values())
