"""Finds backends through the entry-point group ``te_hal.backends`` and loads each without letting it do harm."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from te_hal.schema.backend import Backend
from te_hal.schema.errors import RegistrationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeVar

    T = TypeVar("T")

GROUP = "te_hal.backends"

#: What list_backends and selection errors say when the installation has no metadata.
NO_ENTRY_POINTS = (
    "no entry points in this group, so no backend was found; in a checkout that is not installed, run "
    "`python setup.py -q egg_info` in its root"
)


#: After so long, foreign code that has not come back is named in a warning. Nothing can end it from here.
SLOW_SECONDS = 30.0


def attempt(function: Callable[[], T], what: str) -> tuple[T | None, str]:
    """Run foreign code that brings a backend up; its result, or None and the reason of its failure.

    A broad ``except``: importing or probing somebody else's backend can fail in any way, and must stop neither the
    others nor the listing. Vendor libraries that find no device call ``sys.exit``, so SystemExit is a failure too.
    Kernels never run in here. KeyboardInterrupt passes.

    Args:
        function: runs it.
        what: names it, for the warning that comes where it takes long.
    """
    watch = threading.Timer(SLOW_SECONDS, _warn_of_slow, (what,))
    watch.daemon = True
    watch.start()
    try:
        return function(), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        return None, _say(error)
    finally:
        watch.cancel()


def _warn_of_slow(what: str) -> None:
    warnings.warn(
        f"{what} has taken {SLOW_SECONDS:.0f} s and has not come back; if it hangs, start again with "
        "TE_HAL_DENY=name, with which that backend is not loaded",
        RuntimeWarning,
        stacklevel=2,
    )


def _say(error: BaseException) -> str:
    """Type and text of an error and of its causes: a wrapper must not hide what really went wrong."""
    text = f"{type(error).__name__}: {error}"
    return text if error.__cause__ is None else f"{text} (from {_say(error.__cause__)})"


def discover(
    check: Callable[[Backend], None], denied: Iterable[str] = (), denied_by: str = ""
) -> tuple[dict[str, Backend], dict[str, str]]:
    """Load every entry point, in order of name.

    Args:
        check: raises where a backend does not fit the interface.
        denied: names of backends that are not to be loaded: their code may crash or hang.
        denied_by: who says so.

    Returns:
        Backends by name, and the reasons of those that were refused or failed by entry-point name.
    """
    found: dict[str, Backend] = {}
    failures: dict[str, str] = {}
    points, reason = attempt(_entry_points, "reading the installed metadata")
    if points is None:
        return found, {GROUP: f"the installed metadata cannot be read: {reason}"}
    for name, claims in sorted(_claims(points).items()):
        if name in denied:
            failures[name] = f"is not loaded, because {denied_by} denies it every op"
            continue
        if len(claims) > 1:
            owners = ", ".join(sorted(_owner(point) for point in claims))
            failures[name] = f"several distributions claim this name ({owners}); uninstall all but one"
            continue
        backend, reason = attempt(partial(_load, claims[0], check), f"loading backend {name!r}")
        if backend is None:
            failures[name] = f"failed to load from {claims[0].value}: {reason}"
        else:
            found[name] = backend
    if not found and not failures:
        failures[GROUP] = NO_ENTRY_POINTS
    return found, failures


def installed() -> set[str]:
    """Names of the entry points, without loading any; none where the metadata cannot be read."""
    points, _ = attempt(_entry_points, "reading the installed metadata")
    return {point.name for point in points or ()}


def _entry_points() -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=GROUP))


def _claims(points: Iterable[metadata.EntryPoint]) -> dict[str, list[metadata.EntryPoint]]:
    """Entry points by name; one that is listed twice with the same target counts once."""
    claims: dict[str, list[metadata.EntryPoint]] = {}
    for point in points:
        same_name = claims.setdefault(point.name, [])
        if point.value not in [known.value for known in same_name]:
            same_name.append(point)
    return claims


def _owner(point: metadata.EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'unknown'} with {point.value}"


def _load(point: metadata.EntryPoint, check: Callable[[Backend], None]) -> Backend:
    create = point.load()
    backend = create()
    if not isinstance(backend, Backend):
        raise RegistrationError(
            f"entry point {point.name}",
            got=f"a {type(backend).__name__} from {point.value}",
            accepted="a te_hal.dispatch.Backend",
            todo="let the function build and return one",
        )
    check(backend)
    if backend.name != point.name:
        raise RegistrationError(
            f"entry point {point.name}",
            got=f"a backend named {backend.name!r}",
            accepted=f"the name of the entry point, {point.name!r}",
            todo="use one name for both",
        )
    return backend
