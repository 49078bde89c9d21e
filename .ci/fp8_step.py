"""One FP8 training step on the CPU with whatever te_hal is installed; run from outside a checkout."""

import torch

import te_hal
import te_hal.modules as te
from te_hal.recipe import DelayedScaling


def main() -> None:
    """Forward and backward of one Linear under delayed scaling; every gradient must be there and finite."""
    if "site-packages" not in te_hal.__file__:
        message = f"te_hal comes from {te_hal.__file__}, not from an installation"
        raise SystemExit(message)
    torch.manual_seed(0)
    layer = te.Linear(64, 64)
    inputs = torch.randn(32, 64, requires_grad=True)
    with te.autocast(enabled=True, recipe=DelayedScaling()):
        output = layer(inputs)
    output.square().mean().backward()
    gradients = {"input": inputs.grad, **{name: weight.grad for name, weight in layer.named_parameters()}}
    bad = [name for name, grad in gradients.items() if grad is None or not bool(torch.isfinite(grad).all())]
    if bad:
        message = f"no finite gradient for {', '.join(bad)}"
        raise SystemExit(message)
    print(f"te_hal {te_hal.__version__}, torch {torch.__version__}: FP8 step, output std {output.std():.4f}")


if __name__ == "__main__":
    main()
