"""te_hal.explain: of an op's name or of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from te_hal.explaining.described import described
from te_hal.explaining.model import ModelExplanation, explain_model
from te_hal.explaining.op import OpExplanation, explain_call
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from typing import NoReturn


@overload
def explain(target: torch.nn.Module) -> ModelExplanation: ...
@overload
def explain(target: str, *, device: torch.device | str | None = None, **arguments: Any) -> OpExplanation: ...  # noqa: ANN401


def explain(
    target: str | torch.nn.Module,
    *,
    device: torch.device | str | None = None,
    **arguments: Any,
) -> OpExplanation | ModelExplanation:
    """What would run, where, and why, under the selection in force. Launches nothing, changes nothing.

    Args:
        target: an op's name; or a module or model after a forward, which is explained for the calls it has seen.
        device: of an op's operands; None: the default device.
        arguments: of an op. Operands by dtype, tensor, QuantizedStorage or text (``"bf16"``, ``"e4m3/mxfp8"``), flags
            by value. What is left out has the schema's default, else its first choice: the answer shows the call.

    Returns:
        Data; its ``str`` is the text, ``as_dict()`` plain values.

    Raises:
        ArgumentError: no op, argument or value of that name, or no call that the op takes; arguments for a module.
        ArgumentTypeError: neither a name nor a module.
    """
    if isinstance(target, torch.nn.Module):
        if arguments or device is not None:
            given = ", ".join([*arguments, *(["device"] if device is not None else [])])
            raise ArgumentError(
                "te_hal.explain", got=f"{given} for a module", accepted="the module alone", todo="run a forward first"
            )
        return explain_model(target)
    if not isinstance(target, str):
        _refuse(target)
    return explain_call(described(target, device, arguments))


def _refuse(target: object) -> NoReturn:
    raise ArgumentTypeError(
        "te_hal.explain",
        got=f"a {type(target).__name__}",
        accepted="an op's name, or a torch.nn.Module",
        todo="pass one",
    )
