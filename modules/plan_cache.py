"""PlanCache: what a module's calls run, decided once per description of a call and selection of backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from te_hal.dispatch import current_memo

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


class Plan(Protocol):
    """Bound kernels, with dispatch's memo at the time they were bound."""

    @property
    def memo(self) -> object:
        """Another object after every change of backend or policy."""
        ...


KeyT = TypeVar("KeyT", bound="Hashable")
PlanT = TypeVar("PlanT", bound=Plan)


class PlanCache(Generic[KeyT, PlanT]):
    """Plans of one module by key; each serves as long as the selection under which it was made is in force.

    Args:
        make: makes a plan, or raises for a call that cannot run.
    """

    __slots__ = ("_make", "_plans")

    def __init__(self, make: Callable[[KeyT], PlanT]) -> None:
        self._make = make
        self._plans: dict[KeyT, PlanT] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Plans hold kernels of this process: a copied or pickled cache is empty."""
        return type(self), (self._make,)

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[PlanT]:
        return iter(self._plans.values())

    def get(self, key: KeyT) -> PlanT:
        """The plan of a call: kept, or made now."""
        plan = self._plans.get(key)
        if plan is None or plan.memo is not current_memo():
            plan = self._plans[key] = self._make(key)
        return plan

    def keys(self) -> tuple[KeyT, ...]:
        """What the module's calls were, each once."""
        return tuple(self._plans)

    def make_unkept(self, key: KeyT) -> PlanT:
        """A plan of its own, for whoever asks what would run; the kept ones stay as they are."""
        return self._make(key)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
