"""Running ops one after the other: links as chains, everything else by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from te_hal.modules.ops.chain_function import ChainFunction
from te_hal.modules.ops.input_checks import check_beside
from te_hal.modules.ops.link import steps_of
from te_hal.modules.ops.link_operands import Place
from te_hal.schema.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_hal.modules.ops.link import Link
    from te_hal.modules.ops.operation import FusibleOperation


def run_operations(
    ops: Sequence[FusibleOperation], input: torch.Tensor, extra_inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run ops.

    Args:
        ops: in order.
        input: of the first one.
        extra_inputs: as many as they take together, in order.

    Returns:
        The last one's output, and all extra outputs in order.
    """
    flowing, waiting = input, list(extra_inputs)
    extra_outputs: list[torch.Tensor] = []
    for step in steps_of(ops):
        if isinstance(step, tuple):
            residual = waiting.pop(0) if step[-1].add is not None else None
            flowing = run_chain(step, flowing, residual)
            continue
        taken = [waiting.pop(0) for _ in range(step.num_extra_inputs)]
        found: Any = step(flowing, *taken)
        flowing, *more = found if step.num_extra_outputs else (found,)
        extra_outputs += more
    return flowing, extra_outputs


def run_chain(links: Sequence[Link], input: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Run links one behind the other, as one autograd Function.

    Args:
        links: of a chain.
        input: ``[..., K]``, of the first one.
        residual: what the last one adds, and writes into; None where it adds nothing.

    Returns:
        ``[..., N]`` in the activation dtype.

    Raises:
        As BasicLinear.forward.
    """
    needs = isinstance(input, torch.Tensor) and input.requires_grad
    shape = tuple(input.shape) if isinstance(input, torch.Tensor) else ()
    place, prepared = Place(input, shape, needs, None), []
    for number, link in enumerate(links):
        after = links[number + 1].front if number + 1 < len(links) else None
        follows = after is not None and after.quantizes_gradient
        prepared.append(link.linear.prepare(link, place, activation_follows=follows))
        place = prepared[-1].after
    operands = prepared[0].operands
    add = links[-1].add
    if add is not None:
        like = torch.empty(0, dtype=operands.weight.dtype, device=operands.input.device)
        check_beside(add.label, "extra input", residual, like, place.shape)
    tensors = [tensor for each in prepared for tensor in each.operands.tensors]
    calls, quantized = tuple(each.call for each in prepared), tuple(each.quantized for each in prepared)
    output = ChainFunction.apply(operands.input, residual, quantized, calls, *tensors)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", output)


def check_extra_inputs(label: str, ops: Sequence[FusibleOperation], given: int) -> None:
    """Refuse another number of extra inputs than ops take.

    Raises:
        ArgumentError: names the ops that take some.
    """
    wanted = sum(op.num_extra_inputs for op in ops)
    if wanted != given:
        takers = ", ".join(type(op).__name__ for op in ops if op.num_extra_inputs) or "no op"
        raise ArgumentError(
            f"{label}: extra inputs",
            got=f"{given}",
            accepted=f"{wanted}, as {takers} in it takes them",
            todo="pass them behind the input, in the order of the ops",
        )
