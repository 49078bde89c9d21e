"""The table of backends and of compositions: filled by discovery and by registration, read by selection."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.nn.attention import SDPBackend

from te_hal.dispatch import discovery
from te_hal.dispatch.composition import Composition
from te_hal.dispatch.policy import EVERY_OP
from te_hal.dispatch.policy_source import start_policy
from te_hal.dispatch.signature import check_signature
from te_hal.schema.backend import ANY_DEVICE, Backend, GemmCopies
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import RegistrationError, StateError
from te_hal.schema.formats import FORMATS, ColumnwiseOrder, ScalingMode
from te_hal.schema.gemm import LAYOUTS
from te_hal.schema.support import Code, Support

if TYPE_CHECKING:
    from te_hal.schema.support import Call


@dataclass(frozen=True)
class Tables:
    """What is known about backends. Replaced as a whole, so a reader needs no lock."""

    backends: dict[str, Backend]
    failures: dict[str, str]
    by_api: frozenset[str] = frozenset()
    answers: dict[str, Support] = field(default_factory=dict)


class _Registry:
    """The process's one registry. ``tables`` is None until a backend is first needed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tables: Tables | None = None
        self.loading = False
        self.compositions: dict[str, Composition] = {}
        self.on_change: list[Callable[[], None]] = []

    def renew_lock(self) -> None:
        """In a forked child: whoever held the lock in the parent does not exist here."""
        self.lock = threading.RLock()
        self.loading = False

    def publish(self, tables: Tables) -> None:
        self.tables = tables
        self.changed()

    def changed(self) -> None:
        for notify in self.on_change:
            notify()


REGISTRY = _Registry()
os.register_at_fork(after_in_child=REGISTRY.renew_lock)


def tables() -> Tables:
    """All that is known, after discovery, which the first call runs (other threads wait for it).

    An interrupt during discovery leaves nothing behind, and the next call starts it again.

    Raises:
        StateError: called by a backend while it is being loaded.
    """
    known = REGISTRY.tables
    if known is not None:
        return known
    with REGISTRY.lock:
        if REGISTRY.tables is not None:
            return REGISTRY.tables
        if REGISTRY.loading:
            raise StateError(
                "te_hal.dispatch",
                got="a question about backends from a backend that is being loaded",
                accepted="building and returning a Backend",
                todo="leave registration and selection to te_hal and its user",
            )
        REGISTRY.loading = True
        try:
            policy, said_by = start_policy()
            found = Tables(*discovery.discover(check_backend, policy.deny.get(EVERY_OP, ()), said_by))
        finally:
            REGISTRY.loading = False
        REGISTRY.publish(found)
        return found


def register_backend(backend: Backend) -> None:
    """Add a backend to this process, as a test or a notebook does; packages use an entry point instead.

    It stays until ``te_hal.reset()``. Memos are renewed.

    Raises:
        RegistrationError: the name is taken, or the backend does not fit the op interface; names backend, op and
            parameter.
    """
    check_backend(backend)
    with REGISTRY.lock:
        known = tables()
        if backend.name in known.backends:
            raise RegistrationError(
                f"backend {backend.name}",
                got="a name that is taken",
                accepted=f"any but {', '.join(sorted(known.backends))}",
                todo="choose another name",
            )
        REGISTRY.publish(
            Tables({**known.backends, backend.name: backend}, known.failures, known.by_api | {backend.name})
        )


def forget_registered() -> None:
    """Drop the backends that :func:`register_backend` added and every answer of ``usable()``."""
    with REGISTRY.lock:
        known = REGISTRY.tables
        if known is not None:
            found = {name: b for name, b in known.backends.items() if name not in known.by_api}
            REGISTRY.publish(Tables(found, known.failures))


def register_composition(
    op: str, function: Callable[..., Any], parts: Callable[[Call], Mapping[str, Call]] | None = None
) -> None:
    """Say how an optional op is made of others; used where a backend has no kernel for it, or says no.

    Args:
        op: name of an optional op.
        function: has the signature of the op's schema; with ``parts``, behind a first parameter that has the kernels
            of the parts as attributes.
        parts: the calls that a described call is made of, by the name under which ``function`` finds the kernel. They
            are resolved with the call itself, so a composition keeps the selection that it was bound under.

    Raises:
        RegistrationError: unknown op, one that every backend must have, one composed already, or a signature
            that differs from the schema.
    """
    optional = sorted(name for name, schema in SCHEMAS.items() if schema.optional)
    if op not in optional:
        raise RegistrationError(
            f"composition of {op}", got=repr(op), accepted=", ".join(optional), todo="name an optional op"
        )
    if parts is None:
        check_signature("composition", SCHEMAS[op], function)
    else:
        check_signature("composition", SCHEMAS[op], functools.partial(function, None), takes_rest=True)
    known = REGISTRY.compositions.setdefault(op, Composition(function, parts))
    if known.function is not function:
        raise RegistrationError(
            f"composition of {op}",
            got="a second composition",
            accepted="one, the one in te_hal.ops",
            todo="give the backend a kernel for the op instead",
        )


def ask_usable(backend: Backend, *, afresh: bool = False) -> Support:
    """Whether a backend works on this machine. Remembered, as the question may be slow, unless asked afresh."""
    answers = tables().answers
    known = answers.get(backend.name)
    if known is not None and not afresh:
        return known
    found, reason = discovery.attempt(backend.usable, f"usable() of backend {backend.name!r}")
    if not isinstance(found, Support):
        reason = reason or f"answered {found!r}, which is no Support"
        found = Support.no(Code.ENVIRONMENT, f"its usable() failed: {reason}")
    answers[backend.name] = found
    if known is not None and bool(known) != bool(found):
        REGISTRY.changed()
    return found


def check_backend(backend: Backend) -> None:
    """Refuse what does not fit the op interface.

    Raises:
        RegistrationError: names backend, field or op, and parameter.
    """
    if not isinstance(backend, Backend):
        raise RegistrationError(
            "register_backend",
            got=f"a {type(backend).__name__}",
            accepted="a te_hal.dispatch.Backend",
            todo="see docs/backends.md",
        )
    owner = f"backend {backend.name}"
    for name, is_right, accepted in _FIELDS:
        if not is_right(backend):
            raise RegistrationError(
                f"{owner}: {name}",
                got=repr(getattr(backend, name)),
                accepted=accepted,
                todo="see docs/backends.md",
            )
    _check_gemm_copies(owner, backend)
    for op, function in backend.kernels.items():
        if op not in SCHEMAS:
            raise RegistrationError(
                f"{owner}: kernels", got=f"a kernel for {op!r}", accepted=", ".join(SCHEMAS), todo="see docs/ops.md"
            )
        check_signature(owner, SCHEMAS[op], function)


def _check_gemm_copies(owner: str, backend: Backend) -> None:
    """Ask for every layout, format and mode: quantizers make what the answer names, so a wrong one ends a forward."""
    for question in itertools.product(LAYOUTS, FORMATS.values(), ScalingMode):
        try:
            answer: object = backend.gemm_copies(*question)
        except Exception as error:  # noqa: BLE001 - somebody else's function, which can fail in any way
            answer = f"{type(error).__name__}: {error}"
        if not isinstance(answer, GemmCopies) or not {answer.a, answer.b} <= _COPIES:
            layout, format_, mode = question
            raise RegistrationError(
                f"{owner}: gemm_copies",
                got=f"{answer!r} for {layout}, {format_.name}, {mode.value}",
                accepted="GemmCopies of 'rowwise' or 'columnwise' for a and b, whatever is asked",
                todo="see docs/backends.md",
            )


def _device_types(value: object) -> bool:
    return isinstance(value, frozenset) and all(isinstance(item, str) and item for item in value)


def _sdpa_kernels(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name in SDPBackend.__members__ for name in value)


def _has_a_function_empty(backend: Backend) -> bool:
    return backend.allocator is None or callable(getattr(backend.allocator, "empty", None))


def _claims_only_served(backend: Backend) -> bool:
    claimed = backend.default_for
    return ANY_DEVICE not in claimed and all(backend.takes(device_type) for device_type in claimed)


_COPIES = frozenset({"rowwise", "columnwise"})
#: Field of a Backend, whether it is right, and what would be. In order: a later one may rely on an earlier one.
_FIELDS: tuple[tuple[str, Callable[[Backend], bool], str], ...] = (
    ("name", lambda b: isinstance(b.name, str) and b.name.isidentifier(), "a Python identifier"),
    ("kernels", lambda b: isinstance(b.kernels, Mapping), "a mapping of op names to functions"),
    ("serves", lambda b: bool(b.serves) and _device_types(b.serves), "a frozenset of device types, not empty"),
    ("default_for", lambda b: _device_types(b.default_for), "a frozenset of device types, which may be empty"),
    ("default_for", _claims_only_served, "device types that it serves, each by name"),
    ("supports", lambda b: callable(b.supports), "a function from a Call to a Support"),
    ("usable", lambda b: callable(b.usable), "a function without arguments that gives a Support"),
    ("gemm_copies", lambda b: callable(b.gemm_copies), "a function of layout, format and mode"),
    ("columnwise_order", lambda b: b.columnwise_order in tuple(ColumnwiseOrder), "a ColumnwiseOrder"),
    ("sdpa_kernels", lambda b: _sdpa_kernels(b.sdpa_kernels), f"a tuple of {', '.join(SDPBackend.__members__)}"),
    ("allocator", _has_a_function_empty, "None, or an object with a function empty(shape, dtype, device)"),
    ("description", lambda b: isinstance(b.description, str), "a line of text"),
)
