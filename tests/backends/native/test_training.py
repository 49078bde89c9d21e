"""Training: every cast, amax, scale and history equals that of cpu_reference for the same inputs, step after step."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from native_backends import same

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.dispatch import Backend, register_backend, registry
from te_hal.schema.storage import QuantizedStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from native_backends import NativeBackend

#: Every op that casts or scales; of bias_grad_quantize the sums are no codes, and have a bound of their own.
EXACT = (
    *("quantize", "quantize_current", "bias_grad_quantize", "amax", "compute_scale"),
    *("update_delayed_scale", "update_delayed_scales"),
)
STEPS = 10
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "most recent": recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "current": recipe.Float8CurrentScaling(),
}


class Held:
    """A backend that runs another one's kernels, and cpu_reference's beside the exact ones, and compares."""

    def __init__(self, native: NativeBackend) -> None:
        self.calls: Counter[str] = Counter()
        backends = registry.tables().backends
        source = backends[native.name]
        kernels = {op: self.compared(op, k) if op in EXACT else k for op, k in source.kernels.items()}
        register_backend(
            Backend(
                name="held",
                kernels=kernels,
                serves=source.serves,
                supports=source.supports,
                gemm_copies=source.gemm_copies,
                columnwise_order=source.columnwise_order,
            )
        )

    def compared(self, op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        reference = getattr(ops, op)

        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = [[on_cpu(x) for x in args], {name: on_cpu(x) for name, x in kwargs.items()}]
            result = kernel(*args, **kwargs)
            with te_hal.use_backend("cpu_reference"):
                expected = reference(*own[0], **own[1])
            written = zip((*args, *kwargs.values(), result), (*own[0], *own[1].values(), expected), strict=True)
            assert all(equal(found, wanted) for found, wanted in written), op
            self.calls[op] += 1
            return result

        return run


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, QuantizedStorage):
        return value.with_tensors(tuple(None if t is None else on_cpu(t) for t in value.tensors()))
    if isinstance(value, tuple):
        return tuple(on_cpu(item) for item in value)
    return value


def equal(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return same(found, expected)
    if isinstance(found, QuantizedStorage):
        return all(same(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True))
    if isinstance(found, tuple) and isinstance(found[0], QuantizedStorage):
        return equal(found[0], expected[0]) and torch.allclose(found[1].cpu(), expected[1], rtol=1e-5, atol=1e-5)
    if isinstance(found, tuple):
        return all(equal(a, b) for a, b in zip(found, expected, strict=True))
    return bool(found == expected)


@pytest.fixture(autouse=True)
def _forget_the_backend() -> Iterator[None]:
    yield
    te_hal.reset()


def train(backend: str, device: str, chosen: recipe.Recipe) -> tuple[list[float], torch.nn.Module]:
    """Losses of a regression, and the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(64, 96), te.Linear(96, 32)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with te_hal.use_backend(backend):
        for step in range(STEPS):
            x, target = (torch.randn(48, n, generator=generator).to(device) * (1 + step) for n in (64, 32))
            with te.autocast(recipe=chosen):
                y = model(x)
            loss = (y - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", RECIPES)
def test_every_cast_of_ten_steps_equals_the_reference(name: str, native: NativeBackend) -> None:
    held = Held(native)
    losses, model = train("held", native.device, RECIPES[name])
    # Of two layers: input and weight, and the gradient with the bias's.
    assert held.calls["quantize_current" if name == "current" else "quantize"] == 4 * STEPS
    assert held.calls["bias_grad_quantize"] == 2 * STEPS
    # One in each direction, for both layers together.
    assert held.calls["update_delayed_scales"] == (0 if name == "current" else 2 * STEPS)
    reference_losses, reference = train("cpu_reference", "cpu", RECIPES[name])
    for found, expected in zip(losses, reference_losses, strict=True):
        assert abs(found - expected) <= 1e-3 * abs(expected)
    if name != "current":
        for own, other in zip(model, reference, strict=True):
            found, expected = (m.fp8_meta["scaling_fwd"].amax_history for m in (own, other))
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=0.0)
