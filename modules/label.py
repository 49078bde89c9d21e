"""How a module is called in messages."""

from __future__ import annotations


class Labelled:
    """Mixin of modules with a ``name``."""

    name: str | None

    @property
    def label(self) -> str:
        """Class and name, for messages."""
        return type(self).__name__ if self.name is None else f"{type(self).__name__} {self.name!r}"
