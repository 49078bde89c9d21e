"""Transformer-Engine modules and FP8 recipes on a device-neutral op interface."""

from te_hal._version import __version__

__all__ = ["__version__"]
