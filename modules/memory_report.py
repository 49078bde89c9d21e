"""memory_report: what a model holds, tensor by tensor, in how many bytes, and why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_hal.modules.fp8_module import Fp8Module
from te_hal.quantization import QuantizedTensor
from te_hal.quantization.hybrid_storage import HybridStorage
from te_hal.schema.errors import ArgumentTypeError
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The buffers of a storage in their order: name, and what they are for.
_BUFFERS = (
    ("codes", "codes in rows, which fprop reads"),
    ("scale_inv", "factors back out of the codes in rows"),
    ("columnwise codes", "second copy of the codes, for gemms that read columns"),
    ("columnwise scale_inv", "factors back out of the second copy"),
)

#: What others hang on a parameter, and what it is for.
_ATTRIBUTES = {
    "grad": "gradient; zero_grad(set_to_none=True) drops it",
    "main_grad": "gradient that wgrad adds up in place (fuse_wgrad_accumulation)",
    "decoupled_grad": "gradient that an optimizer with use_decoupled_grad reads",
    "_high_precision_init_val": "initial value, preserved; clear_high_precision_init_val() drops it",
}


class Held(NamedTuple):
    """One tensor.

    Attributes:
        name: of the parameter or module, and what of it.
        kind: "parameter", "gradient", "buffer", "cached weight", "scaling state", "preserved value" or "optimizer".
        shape, dtype, device: of the tensor.
        nbytes: 0 where an earlier entry has the same memory.
        why: what it is for, and what drops it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    why: str


class MemoryReport(NamedTuple):
    """What :func:`memory_report` found; ``print`` it.

    Attributes:
        entries: tensor by tensor.
    """

    entries: tuple[Held, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, shared memory counted once."""
        return sum(entry.nbytes for entry in self.entries)

    def by_kind(self) -> dict[str, int]:
        """Bytes by kind."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total[entry.kind] += entry.nbytes
        return dict(total)

    def __str__(self) -> str:
        rows = [
            (f"{entry.nbytes:,}", entry.name, f"{tuple(entry.shape)} {str(entry.dtype)[6:]}", entry.why)
            for entry in self.entries
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [
            f"{size:>{widths[0]}}  {name:<{widths[1]}}  {what:<{widths[2]}}  {why}" for size, name, what, why in rows
        ]
        kinds = ", ".join(f"{kind} {size:,}" for kind, size in self.by_kind().items())
        return "\n".join([*lines, f"{self.nbytes:,} bytes: {kinds}" if rows else "0 bytes"])


def memory_report(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """What a model, and an optimizer of its parameters, hold between steps: bytes by tensor, and why.

    Parameters (codes and scales of those that live in FP8), gradients, buffers, weights kept for
    ``is_first_microbatch``, scaling state, preserved initial values. What a forward keeps for its backward is not
    there: it belongs to the graph.

    Args:
        model: any module.
        optimizer: whose state to count as well.

    Raises:
        ArgumentTypeError: no module, or no optimizer.
    """
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(value, kind) and (name == "model" or value is not None):
            where = f"memory_report: {name}"
            raise ArgumentTypeError(where, got=f"a {type(value).__name__}", accepted=kind.__name__, todo="pass one")
    seen: dict[tuple[torch.device, int, int], str] = {}
    found = [*_of_parameters(model), *_of_modules(model), *_of_optimizer(model, optimizer)]
    return MemoryReport(tuple(_entry(seen, *each) for each in found))


_Found = tuple[str, str, torch.Tensor, str]


def _entry(
    seen: dict[tuple[torch.device, int, int], str], name: str, kind: str, tensor: torch.Tensor, why: str
) -> Held:
    nbytes, place = tensor.numel() * tensor.element_size(), None
    if nbytes and not tensor.is_meta:
        place = (tensor.device, tensor.data_ptr(), nbytes)
    if place in seen:
        nbytes, why = 0, f"the memory of {seen[place]}"
    elif place is not None:
        seen[place] = name
    size = 0 if tensor.is_meta else nbytes
    return Held(name, kind, tuple(tensor.shape), tensor.dtype, tensor.device, size, why)


def _of_parameters(model: torch.nn.Module) -> Iterator[_Found]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield from _of_tensor(name, "parameter", parameter, "parameter")
        for attribute, why in _ATTRIBUTES.items():
            value = getattr(parameter, attribute, None)
            if isinstance(value, torch.Tensor):
                kind = "preserved value" if attribute.startswith("_") else "gradient"
                yield from _of_tensor(f"{name}.{attribute.strip('_')}", kind, value, why)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield from _of_tensor(name, "buffer", buffer, "buffer")


def _of_modules(model: torch.nn.Module) -> Iterator[_Found]:
    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, Fp8Module)]
    for path, module in modules:
        prefix = f"{path}." if path else ""
        for name, storage in module._fp8_workspaces.items():  # noqa: SLF001 - TE's name for it
            why = "kept since the first microbatch; clear_weight_caches() drops it"
            yield from _of_quantized(f"{prefix}{name} (kept)", "cached weight", storage, why)
        for direction, state in module.delayed_states():
            for name, tensor in (("scale", state.scale), ("amax_history", state.amax_history)):
                yield f"{prefix}{direction}.{name}", "scaling state", tensor, f"delayed scaling: {name} of each tensor"


def _of_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[_Found]:
    if optimizer is None:
        return
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, states in optimizer.state.items():
        for state, value in states.items():
            if isinstance(value, torch.Tensor):
                name = names.get(parameter, "a parameter of another model")
                yield from _of_tensor(f"{name}: {state}", "optimizer", value, "state of the optimizer")


def _of_tensor(name: str, kind: str, tensor: torch.Tensor, why: str) -> Iterator[_Found]:
    if isinstance(tensor, QuantizedTensor):
        yield from _of_quantized(name, kind, tensor.quantized_storage, why)
    else:
        yield name, kind, tensor, why


def _of_quantized(name: str, kind: str, storage: Any, why: str) -> Iterator[_Found]:  # noqa: ANN401 - of any class
    if isinstance(storage, HybridStorage):
        for part, held in (("rowwise", storage.rowwise), ("columnwise", storage.columnwise)):
            if held is not None:
                yield from _of_quantized(f"{name} ({part} part)", kind, held, why)
        return
    if not isinstance(storage, QuantizedStorage):
        plain = storage if isinstance(storage, torch.Tensor) else storage.data
        yield name, kind, plain, f"{why}: in high precision"
        return
    for (part, purpose), tensor in zip(_BUFFERS, storage.tensors(), strict=True):
        if tensor is not None:
            yield f"{name}: {part}", kind, tensor, f"{why}: {purpose}"
