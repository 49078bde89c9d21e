"""quantizer_factory: gives a factory for CustomRecipe a key that says which policy it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from te_hal.schema.errors import ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_Factory = TypeVar("_Factory")


def quantizer_factory(*, key: Hashable) -> Callable[[_Factory], _Factory]:
    """Decorate a factory with ``qfactory_key``; the factory itself is handed back, and not called.

    Args:
        key: hashable; equal keys say that two factories answer alike, see ``CustomRecipe.qfactory_key``. By
            convention a name and a version.

    Raises:
        ArgumentTypeError: a key that cannot be hashed, or is not equal to itself.
    """
    check_key("quantizer_factory key", key)

    def mark(factory: _Factory) -> _Factory:
        factory.qfactory_key = key  # type: ignore[attr-defined] # read by CustomRecipe
        return factory

    return mark


def check_key(where: str, key: object) -> None:
    """Refuse what cannot be hashed, or is not equal to itself: tensors and NaN, inside of tuples too.

    Raises:
        ArgumentTypeError: see above.
    """
    if not _is_a_key(key):
        raise ArgumentTypeError(
            where,
            got=f"{key!r}, a {type(key).__name__}",
            accepted="what is hashable (must be hashable) and equals itself, such as a tuple of a name and a version",
            todo='write key=("my_policy", 1)',
        )


def _is_a_key(key: object) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_a_key, key))
    try:
        hash(key)
    except TypeError:
        return False
    return (key == key) is True  # noqa: PLR0124 - neither NaN is, nor a tensor
