"""Training on one backend while each op also runs on a reference: te_hal.shadow.

Stands above the modules, and judges with the conformance kit. ``docs/shadow.md`` has the walk from a difference to its
cause.

- shadow_block: the public function, and the block that it makes.
- comparison: one call on both sides. agreement: whether two results keep the op's contract.
- difference: what is reported. place: the layer it happened in. cost: what was compared, and what that took.
- call_file: the file that holds a call. replaying: runs it again.
"""

from __future__ import annotations

from te_hal.shadowing.difference import Difference, ShadowError, ShadowWarning
from te_hal.shadowing.replaying import Replay, replay
from te_hal.shadowing.shadow_block import Shadow, shadow

__all__ = ["Difference", "Replay", "Shadow", "ShadowError", "ShadowWarning", "replay", "shadow"]
