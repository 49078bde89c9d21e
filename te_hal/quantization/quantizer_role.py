"""QuantizerRole: which tensor of which module a factory of CustomRecipe is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class QuantizerRole:
    """What is quantized. A text that is empty is not known.

    Attributes:
        module_type: kind of module: "linear".
        tensor_type: "input", "weight" or "grad_output".
        name: of the module; of LayerNormMLP's products ``<name>.fc1`` and ``<name>.fc2``.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        known = [f"{field}={value}" for field, value in self.__dict__.items() if value]
        return "|".join(known) if known else "QuantizerRole()"


#: Roles of the slots of one direction; None for a tensor that leaves the module to a consumer it does not know.
SlotRoles = tuple[QuantizerRole | None, ...]


def linear_roles(
    names: Sequence[str], output: QuantizerRole | None = None, grad_input: QuantizerRole | None = None
) -> dict[str, SlotRoles]:
    """Roles of a module with linear products one after the other, per direction, in slot order.

    Args:
        names: of the products.
        output: role of the last product's output, in the module that reads it.
        grad_input: role of the first product's grad_input, in the module that reads it.

    Returns:
        ``scaling_fwd``: input, weight and output of each product; ``scaling_bwd``: grad_output and grad_input of each.
        A result between two products has the role that it has for its consumer.
    """
    inputs = [QuantizerRole("linear", "input", name) for name in names]
    gradients = [QuantizerRole("linear", "grad_output", name) for name in names]
    outputs, grad_inputs = [*inputs[1:], output], [grad_input, *gradients[:-1]]
    forward: list[QuantizerRole | None] = []
    backward: list[QuantizerRole | None] = []
    for number, name in enumerate(names):
        forward += [inputs[number], QuantizerRole("linear", "weight", name), outputs[number]]
        backward += [gradients[number], grad_inputs[number]]
    return {"scaling_fwd": tuple(forward), "scaling_bwd": tuple(backward)}
