"""Generation: the cache of keys and values, and the rows that FP8 needs beyond a step's (docs/inference.md)."""

from __future__ import annotations

from te_hal.modules.inference.inference_params import InferenceParams

__all__ = ["InferenceParams"]
