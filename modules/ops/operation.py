"""What all ops share: how many extra tensors they take and give, and which part of a chain they may be."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import torch

from te_hal.modules.label import Labelled
from te_hal.modules.state_dict import OptionalExtraState

if TYPE_CHECKING:
    from collections.abc import Iterator


class Part(Enum):
    """What a basic op is to the product beside it (te_hal.modules.ops.link)."""

    FRONT = "computes what the product reads"
    PRODUCT = "the product"
    BIAS = "is added by the product"
    ADD = "adds a tensor to what the product gives"


class FusibleOperation(torch.nn.Module):
    """An op of :class:`te_hal.modules.ops.Sequential`, which also runs alone.

    Attributes:
        num_extra_inputs: tensors that ``forward`` takes beside its input.
        num_extra_outputs: tensors that it gives beside its output; if there are any, it gives a tuple.
        part: what it may be to a product; None: it runs by itself.
        quantizes_gradient: its backward may quantize the gradient for the product before it.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    part: ClassVar[Part | None] = None
    quantizes_gradient: ClassVar[bool] = False

    def basic_operations(self) -> Iterator[BasicOperation]:
        """The ops that it consists of, in order."""
        raise NotImplementedError

    @property
    def is_fused_op(self) -> bool:
        """Whether it is made of several."""
        return False

    def may_join(self) -> bool:
        """Whether it can run as its ``part`` with the settings that it has."""
        return self.part is not None

    def has_hooks(self) -> bool:
        """Whether torch calls something around its forward or backward."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)


class BasicOperation(Labelled, OptionalExtraState, FusibleOperation):
    """An op that is not made of others; ``_extra_state`` is in every state dict, mostly without elements.

    Attributes:
        joined: with which op it ran as one, for te_hal.explain; empty where it never did.
    """

    name: str | None = None
    joined: str = ""

    def basic_operations(self) -> Iterator[BasicOperation]:
        """Itself."""
        yield self
