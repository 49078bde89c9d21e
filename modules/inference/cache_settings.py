"""What a cache for generation is made with."""

from __future__ import annotations

from typing import Any

from te_hal.modules.arguments import check_size
from te_hal.schema.errors import ArgumentError
from te_hal.schema.flags import check_flags
from te_hal.schema.formats import FLOATS
from te_hal.schema.refusals import declare, refuse

_REFUSED = declare(
    "InferenceParams",
    {"custom_cache_manager": None},
    {"custom_cache_manager": "is_paged chooses between the two layouts that there are"},
)

#: Those of attention, which imports what is here.
_FORMATS = ("bshd", "sbhd", "thd")


def check_settings(kind: str, given: dict[str, Any]) -> None:
    """Check the arguments of InferenceParams, by name.

    Raises:
        ArgumentError: see InferenceParams.
        UnsupportedError: see there.
    """
    refuse(kind, given, _REFUSED)
    check_flags(kind, {"is_paged": given["is_paged"]})
    for name in ("max_batch_size", "max_sequence_length", "num_heads_kv", "head_dim_k"):
        check_size(f"{kind}: {name}", given[name])
    for name in ("head_dim_v", "max_ctx_len", "page_size", "total_num_pages"):
        if given[name] is not None:
            check_size(f"{kind}: {name}", given[name])
    if given["dtype"] not in FLOATS:
        accepted = "torch.float32, torch.bfloat16, torch.float16: the activation dtype"
        raise ArgumentError(f"{kind}: dtype", got=repr(given["dtype"]), accepted=accepted, todo="pass it")
    if given["qkv_format"] not in _FORMATS:
        accepted = ", ".join(_FORMATS)
        raise ArgumentError(f"{kind}: qkv_format", got=repr(given["qkv_format"]), accepted=accepted, todo="correct it")
    paged = given["page_size"] is not None
    if given["is_paged"] is not paged or (given["total_num_pages"] is not None and not paged):
        raise ArgumentError(
            f"{kind}: page_size",
            got=f"{given['page_size']!r} with is_paged={given['is_paged']}, total_num_pages={given['total_num_pages']}",
            accepted="a page_size with is_paged=True, and neither it nor total_num_pages without",
            todo="set both, or leave them out",
        )
