"""Cross attention in a step of generation: new queries over the whole encoder's output, which no cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_hal.modules.attention.bias import ALIBI
from te_hal.modules.attention.call import format_and_mask_type
from te_hal.modules.attention.layout import PACKED
from te_hal.modules.attention.masks import RULES
from te_hal.modules.attention.visibility import EVERYTHING, check_window
from te_hal.modules.inference.inference_params import InferenceParams
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from te_hal.modules.attention.call import Attention


def without_cache(core: Attention, label: str, given: dict[str, Any]) -> dict[str, Any]:
    """A step's arguments of MultiheadAttention, as attention to an encoder's output takes them.

    Keys and values are not kept: the encoder's output is projected at each step. Lengths of packed queries are the
    step's.

    Args:
        core: the DotProductAttention.
        label: the MultiheadAttention, for messages.
        given: the arguments of its forward by name; ``inference_params`` is what they have of a step.

    Raises:
        ArgumentTypeError: ``inference_params`` is none.
        StateError: no step under way.
        ArgumentError: what depends on the position of a query, which a step's queries do not show.
    """
    params = given["inference_params"]
    if not isinstance(params, InferenceParams):
        where, got = f"{label}: inference_params", f"a {type(params).__name__}"
        raise ArgumentTypeError(where, got=got, accepted="a te.InferenceParams", todo="make one")
    params.step_under_way  # noqa: B018 - refuses where there is none
    chosen, name = format_and_mask_type(core, label, given)
    _refuse_positions(core, label, given, name)
    answered: dict[str, Any] = {"inference_params": None}
    if chosen == PACKED and given["cu_seqlens_q"] is None:
        answered["cu_seqlens_q"] = params.cu_seqlens_q.to(given["hidden_states"].device)
    return given | answered


def _refuse_positions(core: Attention, label: str, given: dict[str, Any], name: str) -> None:
    asked = given["window_size"]
    window = check_window(label, core.window_size if asked is None else asked, name)
    for argument, value, depends in (
        ("attn_mask_type", repr(name), RULES[name].causal != "none"),
        ("window_size", repr(window), window != EVERYTHING),
        ("core_attention_bias_type", repr(ALIBI), given["core_attention_bias_type"] == ALIBI),
    ):
        if depends:
            raise ArgumentError(
                f"{label}: {argument}",
                got=f"{value} for cross attention with inference_params",
                accepted="what does not depend on where a query stands: no_mask, padding or arbitrary, no window, no "
                "ALiBi: a step's queries do not begin at position 0",
                todo="leave it out, or run the whole sequence without inference_params",
            )
