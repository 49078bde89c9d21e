"""Runs: what runs a call of an op."""

from __future__ import annotations

import enum


class Runs(str, enum.Enum):
    """What runs a call."""

    KERNEL = "kernel"
    COMPOSITION = "composition"
    FALLBACK = "fallback"
    NOBODY = "nobody"
