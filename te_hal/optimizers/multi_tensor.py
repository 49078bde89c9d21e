"""Operations on many tensors at once, under Transformer Engine's names and arguments.

Each takes ``chunk_size`` (how a GPU's kernel cuts its work: an int above 0, which decides no value here), ``noop_flag``
(a tensor of one number, or None) and lists of tensors of one length. All is computed in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.optimizers.fused_adam import AdamSettings, adam_update
from te_hal.optimizers.hyperparameters import check_number
from te_hal.optimizers.multi_tensor_arguments import check_chunk, check_fp32, is_set, number, tensors_of
from te_hal.schema.errors import ArgumentError, NotBuiltError
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
        check_chunk("MultiTensorApply", chunk_size)
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
        lists = tensors_of("MultiTensorApply", tensor_lists)
        kept = [place for place, tensor in enumerate(lists[0]) if tensor.numel()]
        if not kept:
            return None
        return op(self.chunk_size, noop_flag_buffer, [[of[place] for place in kept] for of in lists], *args)


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
    check_chunk(where, chunk_size)
    sources, targets = tensors_of(where, tensor_lists, 2)
    is_set(where, noop_flag)
    factor = number(f"{where}: scale", scale)
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
        noop_flag: set to 1 where the norm of a tensor is infinite or NaN; what was in it decides nothing.
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
    """:func:`multi_tensor_l2norm` of the tensors, multiplied by ``inv_scale`` before they are squared.

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
    check_chunk(where, chunk_size)
    is_set(where, noop_flag)
    check_flags(where, {"per_tensor": per_tensor})
    (tensors,) = tensors_of(where, tensor_lists, 1)
    norms = torch.stack([_scaled(tensor, factor).norm() for tensor in tensors])
    if noop_flag is not None and not bool(norms.isfinite().all()):
        noop_flag.fill_(1)
    return norms.norm().reshape(1), norms if per_tensor else norms[:0]


def _scaled(tensor: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    values = tensor.detach().to(torch.float32)
    return values if factor is None else values * factor.to(values.device, torch.float32).reshape(())


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
    check_chunk(where, chunk_size)
    lists = tensors_of(where, tensor_lists, 4, 5)
    check_fp32(where, lists[2:])
    _check_adam(where, {"lr": lr, "epsilon": epsilon, "weight_decay": weight_decay}, {"beta1": beta1, "beta2": beta2})
    _check_choices(where, step, mode, bias_correction)
    if is_set(where, noop_flag):
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


def _check_adam(where: str, numbers: dict[str, float], rates: dict[str, float]) -> None:
    for name, value in numbers.items():
        check_number(f"{where}: {name}", value)
    for name, rate in rates.items():
        check_number(f"{where}: {name}", rate, below=1.0)


def _check_choices(where: str, step: object, mode: object, bias_correction: object) -> None:
    right = type(mode) is int and mode in _MODES and type(step) is int and step >= 1
    if not right or bias_correction not in (0, 1):
        raise ArgumentError(
            where,
            got=f"step={step!r}, mode={mode!r}, bias_correction={bias_correction!r}",
            accepted="a step of at least 1; mode 0 (L2) or 1 (AdamW); bias_correction 0 or 1",
            todo="correct them",
        )


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
