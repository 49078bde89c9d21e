"""parallel_cross_entropy: the loss of each token, in fp32, with a backward that keeps no probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_hal.modules.arguments import check_number, renamed
from te_hal.modules.once import once
from te_hal.modules.transforms import run_eagerly
from te_hal.quantization import QuantizedTensor
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.flags import check_flags
from te_hal.schema.formats import FLOATS
from te_hal.schema.refusals import declare, refuse

_REFUSED = declare(
    "parallel_cross_entropy",
    {"dist_process_group": None},
    {"dist_process_group": "one process has all classes: te_hal has no tensor parallelism; gather the classes first"},
)

_WHERE = "parallel_cross_entropy"

#: Logits that are widened to fp32 at a time.
_AT_ONCE = 1 << 20


class _Settings(NamedTuple):
    smoothing: float
    ignored: int


@run_eagerly
def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: object = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of logits and targets, in nats; ``inp`` is left as it is.

    Args:
        inp: logits ``[..., classes]`` in fp32, bf16 or fp16.
        target: integers ``[...]`` below ``classes``, or ``ignore_idx``.
        label_smoothing: share of a target's weight that is spread over all classes, from 0 to 1.
        reduce_loss: return the mean over targets that are not ignored (0 where all are).
        dist_process_group: None; classes spread over processes are refused by name.
        ignore_idx: a target whose loss and gradient are 0.
        is_cg_capturable: wait for no device, so that the call can be captured: targets are not looked at before.
        _input: the older name of ``inp``.

    Returns:
        fp32 ``[...]``, or one number.

    Raises:
        ArgumentTypeError: no plain tensors.
        ArgumentError: shapes, dtypes or devices that do not fit; a target that is no class; a smoothing out of range.
        UnsupportedError: a process group.
    """
    logits = renamed(_WHERE, "inp", inp, "_input", _input)
    refuse(_WHERE, {"dist_process_group": dist_process_group}, _REFUSED)
    check_flags(_WHERE, {"reduce_loss": reduce_loss, "is_cg_capturable": is_cg_capturable})
    logits = _checked(logits, target, label_smoothing, ignore_idx)
    if not is_cg_capturable:
        _check_targets(target, logits.shape[-1], ignore_idx)
    settings = _Settings(float(label_smoothing), ignore_idx)
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, settings)  # type: ignore[no-untyped-call]
    if not reduce_loss:
        return losses
    counted = (target != ignore_idx).sum().clamp_min(1)
    return losses.sum() / counted


def _checked(inp: object, target: object, label_smoothing: object, ignore_idx: object) -> torch.Tensor:
    """The logits, after a look at everything but the targets' values."""
    if not isinstance(inp, torch.Tensor) or not isinstance(target, torch.Tensor) or isinstance(inp, QuantizedTensor):
        got = f"a {type(inp).__name__} and a {type(target).__name__}"
        raise ArgumentTypeError(_WHERE, got=got, accepted="plain tensors inp and target", todo="pass tensors")
    fits = inp.dim() > 0 and inp.dtype in FLOATS and target.shape == inp.shape[:-1] and target.device == inp.device
    if not fits or target.is_floating_point() or target.dtype == torch.bool or not inp.shape[-1]:
        raise ArgumentError(
            _WHERE,
            got=f"inp {tuple(inp.shape)} of {inp.dtype} on {inp.device}, target {tuple(target.shape)} of "
            f"{target.dtype} on {target.device}",
            accepted=f"[..., classes] in {', '.join(map(str, FLOATS))} and integers [...], on one device",
            todo="correct them",
        )
    check_number(f"{_WHERE}: label_smoothing", label_smoothing, (0, 1))
    if type(ignore_idx) is not int:
        raise ArgumentError(f"{_WHERE}: ignore_idx", got=repr(ignore_idx), accepted="an int", todo="correct it")
    return inp


def _check_targets(target: torch.Tensor, classes: int, ignore_idx: int) -> None:
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_idx)
    if bool(wrong.any()):
        raise ArgumentError(
            f"{_WHERE}: target",
            got=f"{int(target[wrong][0])}, one of {int(wrong.sum())} that are no class",
            accepted=f"from 0 to {classes - 1}, or ignore_idx={ignore_idx}",
            todo="correct the targets, or pass ignore_idx",
        )


class _CrossEntropy(torch.autograd.Function):
    """Loss per row. Keeps the logits, the targets and one number per row."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, target: torch.Tensor, settings: _Settings) -> torch.Tensor:  # noqa: ANN401
        """fp32 losses of the shape of ``target``."""
        logits, labels = inp.reshape(-1, inp.shape[-1]), target.reshape(-1)
        losses = torch.empty(len(logits), dtype=torch.float32, device=inp.device)
        normalizers = torch.empty_like(losses)
        for part in _parts(logits):
            losses[part], normalizers[part] = _losses(logits[part].float(), labels[part], settings)
        ctx.save_for_backward(inp, target, normalizers)
        ctx.settings = settings
        return losses.view(target.shape)

    @staticmethod
    @run_eagerly
    @once(lambda _: _WHERE)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """The logits' gradient in their dtype; exactly 0 in rows that are ignored."""
        inp, target, normalizers = ctx.saved_tensors
        settings: _Settings = ctx.settings
        logits, labels, factors = inp.reshape(-1, inp.shape[-1]), target.reshape(-1), gradient.reshape(-1)
        made = torch.empty(logits.shape, dtype=inp.dtype, device=inp.device)
        for part in _parts(logits):
            known = labels[part] != settings.ignored
            found = (logits[part].float() - normalizers[part, None]).exp_()
            found.sub_(settings.smoothing / logits.shape[-1])
            label = labels[part].to(torch.int64).where(known, 0)[:, None]
            found.scatter_add_(1, label, torch.full(label.shape, settings.smoothing - 1, device=inp.device))
            found.mul_(factors[part, None].float())
            made[part] = found.masked_fill_(~known[:, None], 0).to(inp.dtype)
        return made.view(inp.shape), None, None


def _parts(logits: torch.Tensor) -> list[slice]:
    """Rows at a time, so that few of them stand in fp32 at once."""
    step = max(1, _AT_ONCE // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _losses(logits: torch.Tensor, labels: torch.Tensor, settings: _Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and logarithms of the sums of exponentials, per row."""
    known = labels != settings.ignored
    normalizers = logits.logsumexp(dim=1)
    label = labels.to(torch.int64).where(known, 0)[:, None]
    losses = normalizers - logits.gather(1, label)[:, 0]
    if settings.smoothing:
        losses = (1 - settings.smoothing) * losses + settings.smoothing * (normalizers - logits.mean(dim=1))
    return losses.where(known, 0), normalizers
