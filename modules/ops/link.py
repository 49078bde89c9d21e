"""Link: neighbouring ops that run as one product: what computes its input, the product, its bias, what is added.

Consecutive links make a chain, one autograd Function (te_hal.modules.ops.chain_function). In it a norm or an activation
quantizes its result for the product behind it, and an activation's backward the gradient for the product before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from te_hal.modules.ops.operation import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.modules.ops.activation import Activation
    from te_hal.modules.ops.basic_linear import BasicLinear
    from te_hal.modules.ops.bias import Bias
    from te_hal.modules.ops.extra_tensors import AddExtraInput
    from te_hal.modules.ops.norms import LayerNorm, RMSNorm
    from te_hal.modules.ops.operation import FusibleOperation

    Front: TypeAlias = LayerNorm | RMSNorm | Activation


class Link(NamedTuple):
    """Ops that run as one product; None for what is not there."""

    front: Front | None
    linear: BasicLinear
    bias: Bias | None
    add: AddExtraInput | None


#: Which parts may follow a part of a link; None: begin one.
_NEXT: dict[Part | None, tuple[Part, ...]] = {
    None: (Part.FRONT, Part.PRODUCT),
    Part.FRONT: (Part.PRODUCT,),
    Part.PRODUCT: (Part.BIAS, Part.ADD),
    Part.BIAS: (Part.ADD,),
    Part.ADD: (),
}

#: What runs by itself: an op, or links one behind the other.
Step: TypeAlias = "FusibleOperation | tuple[Link, ...]"


def steps_of(ops: Sequence[FusibleOperation]) -> list[Step]:
    """Divide ops into what runs as one.

    Args:
        ops: in order. One with hooks of torch's runs by itself, so that they do.
    """
    steps: list[Step] = []
    chain: list[Link] = []
    position = 0
    while position < len(ops):
        link = _link_at(ops, position)
        if link is not None:
            chain.append(link)
            position += sum(part is not None for part in link)
        if chain and (link is None or link.add is not None):
            steps.append(tuple(chain))
            chain = []
        if link is None:
            steps.append(ops[position])
            position += 1
    return [*steps, tuple(chain)] if chain else steps


def _link_at(ops: Sequence[FusibleOperation], start: int) -> Link | None:
    """The link that begins with an op; None where none does."""
    found: dict[Part, FusibleOperation] = {}
    last: Part | None = None
    for op in ops[start:]:
        if op.part not in _NEXT[last] or not op.may_join() or op.has_hooks():
            break
        last = op.part
        found[last] = op
    if Part.PRODUCT not in found:
        return None
    parts = [found.get(part) for part in Part]  # in the order of Link
    return Link(*cast("tuple[Front | None, BasicLinear, Bias | None, AddExtraInput | None]", parts))
