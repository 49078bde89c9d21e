"""Operations on many tensors at once, under Transformer Engine's names and arguments.

Each takes ``chunk_size`` (how a GPU's kernel cuts its work: an int above 0, which decides no value here), ``noop_flag``
(a tensor of one number, or None) and lists of tensors of one length. All is computed in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.optimizers.fused_adam import AdamSettings, adam_update
from te_hal.optimizers.hyperparameters import check_number
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, NotBuiltError
from te_hal.schema.flags import check_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Lists = Sequence[Sequence[torch.Tensor]]

_MODES = {0: "L2", 1: "AdamW"}
_CHUNK = 2048 * 32


class MultiTensorApply:
    """Calls one of these operations with a chunk size, without tensors that have no elements.

    Args:
        chunk_size: handed on.

    Raises:
        ArgumentError: no int above 0.
    """

    def __init__(self, chunk_size: int) -> None:
        _check_chunk("MultiTensorApply", chunk_size)
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor | None,
        tensor_lists: Lists,
        *args: Any,  # noqa: ANN401 - the operation's
    ) -> Any:  # noqa: ANN401 - the operation's
        """What ``op(chunk_size, noop_flag_buffer, lists, *args)`` gives; None where no tensor has elements.

        Raises:
            ArgumentTypeError: no lists of tensors.
            ArgumentError: lists of different lengths.
        """
        lists = _checked("MultiTensorApply", tensor_lists)
        kept = [number for number, tensor in enumerate(lists[0]) if tensor.numel()]
        if not kept:
            return None
        return op(self.chunk_size, noop_flag_buffer, [[of[number] for number in kept] for of in lists], *args)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: Lists, scale: float) -> None:
    """Write the tensors of the first list, times ``scale``, into those of the second, in place.

    Args:
        chunk_size: see the file's head.
        noop_flag: set to 1 where a tensor of the first list has an infinity or NaN; what was in it decides nothing.
        tensor_lists: two.
        scale: a number.

    Raises:
        ArgumentTypeError, ArgumentError: lists, a flag or a number that do not fit.
    """
    where = "multi_tensor_scale"
    _check_chunk(where, chunk_size)
    sources, targets = _checked(where, tensor_lists, count=2)
    _flag(where, noop_flag)
    factor = _number(f"{where}: scale", scale)
    finite = True
    for source, target in zip(sources, targets, strict=True):
        values = source.detach().to(torch.float32)
        finite = finite and bool(values.isfinite().all())
        target.copy_(values * factor)
    if not finite and noop_flag is not None:
        noop_flag.fill_(1)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor | None, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The root of the sum of squares over all tensors of a list.

    Args:
        chunk_size: see the file's head.
        noop_flag: left as it is: infinities and NaN go into the norm.
        tensor_lists: one.
        per_tensor: give the norm of each tensor too.

    Returns:
        fp32 ``[1]``, and fp32 ``[tensors]``, which has no elements unless asked for.

    Raises:
        ArgumentTypeError, ArgumentError: lists or flags that do not fit.
    """
    return _norms("multi_tensor_l2norm", chunk_size, noop_flag, tensor_lists, None, per_tensor=per_tensor)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`multi_tensor_l2norm` of the tensors times ``inv_scale``; they stay as they are.

    Args:
        chunk_size: see the file's head.
        noop_flag: as there.
        tensor_lists: as there.
        inv_scale: a tensor of one number.
        per_tensor: as there.

    Returns:
        As there.

    Raises:
        ArgumentTypeError, ArgumentError: as there.
    """
    where = "multi_tensor_unscale_l2norm"
    if not isinstance(inv_scale, torch.Tensor) or inv_scale.numel() != 1:
        got = f"shape {tuple(inv_scale.shape)}" if isinstance(inv_scale, torch.Tensor) else repr(inv_scale)
        raise ArgumentError(f"{where}: inv_scale", got=got, accepted="a tensor of one number", todo="correct it")
    return _norms(where, chunk_size, noop_flag, tensor_lists, inv_scale, per_tensor=per_tensor)


def _norms(
    where: str,
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    factor: torch.Tensor | None,
    *,
    per_tensor: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_chunk(where, chunk_size)
    _flag(where, noop_flag)
    check_flags(where, {"per_tensor": per_tensor})
    (tensors,) = _checked(where, tensor_lists, count=1)
    norms = torch.stack([tensor.detach().to(torch.float32).norm() for tensor in tensors])
    if factor is not None:
        norms = norms * factor.to(norms.device, torch.float32).reshape(()).abs()
    return norms.norm().reshape(1), norms if per_tensor else norms[:0]


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of FusedAdam's formulas, in place.

    Args:
        chunk_size: see the file's head.
        noop_flag: where it is not 0, nothing is done.
        tensor_lists: gradients, parameters, first and second moments (fp32); and fp32 masters, which then hold the
            values that the parameters are rounded from.
        lr: the learning rate.
        beta1: of the first moments.
        beta2: of the second moments.
        epsilon: added to the root.
        step: counts this one, from 1.
        mode: 0: weight decay is added to the gradient (Adam), 1: to the step (AdamW).
        bias_correction: 1 or True; 0 or False.
        weight_decay: a number.

    Raises:
        ArgumentTypeError, ArgumentError: lists or numbers that do not fit.
    """
    where = "multi_tensor_adam"
    _check_chunk(where, chunk_size)
    lists = _checked(where, tensor_lists, count=len(tensor_lists) if len(tensor_lists) == 5 else 4)  # noqa: PLR2004
    for name, value in {"lr": lr, "epsilon": epsilon, "weight_decay": weight_decay}.items():
        check_number(f"{where}: {name}", value)
    for name, rate in {"beta1": beta1, "beta2": beta2}.items():
        check_number(f"{where}: {name}", rate, below=1.0)
    if mode not in _MODES or type(step) is not int or step < 1 or bias_correction not in (0, 1):
        raise ArgumentError(
            where,
            got=f"step={step!r}, mode={mode!r}, bias_correction={bias_correction!r}",
            accepted="a step of at least 1; mode 0 (L2) or 1 (AdamW); bias_correction 0 or 1",
            todo="correct them",
        )
    if _flag(where, noop_flag):
        return
    gradients, parameters, first, second, *masters = lists
    kept = masters[0] if masters else parameters
    values = [tensor.detach().to(torch.float32) for tensor in kept]
    wide = [gradient.detach().to(torch.float32) for gradient in gradients]
    decoupled, corrected = _MODES[mode] == "AdamW", bool(bias_correction)
    settings = AdamSettings(lr, (beta1, beta2), epsilon, weight_decay, step, decoupled, corrected)
    adam_update(values, wide, (list(first), list(second)), settings)
    for targets in (kept, parameters) if masters else (parameters,):
        for target, stepped in zip(targets, values, strict=True):
            if target.data_ptr() != stepped.data_ptr():
                target.copy_(stepped)


def _check_chunk(where: str, chunk_size: object) -> None:
    if type(chunk_size) is not int or chunk_size < 1:
        got = repr(chunk_size)
        raise ArgumentError(f"{where}: chunk_size", got=got, accepted="an int of at least 1", todo="correct it")


def _checked(where: str, tensor_lists: object, count: int | None = None) -> list[list[torch.Tensor]]:
    """Lists of one length, whose tensors at one place have one shape."""
    if not isinstance(tensor_lists, (list, tuple)) or not all(isinstance(of, (list, tuple)) for of in tensor_lists):
        got = f"a {type(tensor_lists).__name__}"
        raise ArgumentTypeError(f"{where}: tensor_lists", got=got, accepted="lists of tensors", todo="pass lists")
    lists = [list(of) for of in tensor_lists]
    if not all(isinstance(tensor, torch.Tensor) for of in lists for tensor in of):
        raise ArgumentTypeError(
            f"{where}: tensor_lists", got="what is no tensor", accepted="lists of tensors", todo="pass tensors"
        )
    lengths = [len(of) for of in lists]
    if not lists or len(set(lengths)) > 1 or not lengths[0] or (count is not None and len(lists) != count):
        wanted = "lists" if count is None else f"{count} lists"
        raise ArgumentError(
            f"{where}: tensor_lists",
            got=f"{len(lists)} lists of {lengths} tensors",
            accepted=f"{wanted} of one length above 0",
            todo="correct them",
        )
    for place, tensors in enumerate(zip(*lists, strict=True)):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(shapes)) > 1:
            got = f"shapes {shapes} at {place}"
            accepted = "one shape at each place"
            raise ArgumentError(f"{where}: tensor_lists", got=got, accepted=accepted, todo="correct them")
    return lists


def _flag(where: str, noop_flag: object) -> bool:
    """Whether it is set; a None never is."""
    if noop_flag is None:
        return False
    if isinstance(noop_flag, torch.Tensor) and noop_flag.numel() == 1:
        return bool(noop_flag.ne(0))
    got = f"shape {tuple(noop_flag.shape)}" if isinstance(noop_flag, torch.Tensor) else repr(noop_flag)
    raise ArgumentError(f"{where}: noop_flag", got=got, accepted="a tensor of one number, or None", todo="correct it")


def _number(where: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ArgumentError(where, got=repr(value), accepted="a number", todo="correct it")


#: Transformer Engine's other kernels, by what does their work here.
LATER = {
    **dict.fromkeys(("multi_tensor_adam_fp8", "multi_tensor_adam_param_remainder"), "FusedAdam"),
    **dict.fromkeys(("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"), "FusedAdam"),
    "multi_tensor_sgd": "FusedSGD",
}


def later(name: str) -> NotBuiltError:
    """The error about one of them."""
    return NotBuiltError(
        f"te_hal.optimizers.{name}",
        got="a kernel that is not built by itself",
        accepted="MultiTensorApply, multi_tensor_adam, multi_tensor_l2norm, multi_tensor_scale, "
        "multi_tensor_unscale_l2norm",
        todo=f"use te.optimizers.{LATER[name]}, which does its work",
    )


#: With the chunk size that Transformer Engine's optimizers use.
multi_tensor_applier = MultiTensorApply(_CHUNK)
