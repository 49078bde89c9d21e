"""Ops that communicate between processes, and fusions of the user's own: refused by name."""

from __future__ import annotations

from typing import NoReturn

from te_hal.modules.ops.operation import BasicOperation
from te_hal.schema.errors import UnsupportedError

_TODO = "communicate between two models or modules, by torch.distributed"


class _Communication(BasicOperation):
    def __init__(self, process_group: object = None, **settings: object) -> None:
        given = ", ".join(f"{name}={value!r}" for name, value in {"process_group": process_group, **settings}.items())
        kind = type(self).__name__
        raise UnsupportedError(f"te.ops.{kind}", got=given, accepted="ops that run in one process", todo=_TODO)


class AllGather(_Communication):
    """Gather along the first dimension: refused."""

    def __init__(self, process_group: object = None) -> None:
        super().__init__(process_group)


class AllReduce(_Communication):
    """Sum over processes: refused."""

    def __init__(self, process_group: object = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group, reduce_in_backward=reduce_in_backward)


class ReduceScatter(_Communication):
    """Sum over processes, of which each keeps its part: refused."""

    def __init__(self, process_group: object = None) -> None:
        super().__init__(process_group)


def _refuse_fusion(name: str) -> NoReturn:
    raise UnsupportedError(
        f"te.ops.{name}",
        got="a function that fuses ops",
        accepted="the fusions of docs/fusible_ops.md",
        todo="write a fused op's kernel in a backend (docs/porting.md): every model then runs it",
    )


def register_forward_fusion(func: object, prepend: bool = False) -> NoReturn:  # noqa: ARG001 - refused
    """Refused: what runs as one is decided by te_hal, and its kernels are a backend's."""
    _refuse_fusion("register_forward_fusion")


def register_backward_fusion(func: object, prepend: bool = False) -> NoReturn:  # noqa: ARG001 - refused
    """Refused, as :func:`register_forward_fusion`."""
    _refuse_fusion("register_backward_fusion")


def register_forward_backward_fusion(func: object, prepend: bool = False) -> NoReturn:  # noqa: ARG001 - refused
    """Refused, as :func:`register_forward_fusion`."""
    _refuse_fusion("register_forward_backward_fusion")
