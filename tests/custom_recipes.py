"""Modules, factories and steps for tests of CustomRecipe."""

from __future__ import annotations

import torch

import te_hal.modules as te
from te_hal import recipe
from te_hal.quantization import quantizer_factories as factories

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16 = torch.bfloat16

MODULES = {
    "Linear": lambda name=None: te.Linear(160, 96, params_dtype=BF16, name=name),
    "LayerNormLinear": lambda name=None: te.LayerNormLinear(160, 96, params_dtype=BF16, name=name),
    "LayerNormMLP": lambda name=None: te.LayerNormMLP(160, 96, params_dtype=BF16, name=name),
}
READY = {
    "delayed": (factories.delayed_scaling_factory, recipe.DelayedScaling),
    "current": (factories.current_scaling_factory, recipe.Float8CurrentScaling),
    "block": (factories.float8_block_scaling_factory, recipe.Float8BlockScaling),
    "mxfp8": (factories.mxfp8_factory, recipe.MXFP8BlockScaling),
    "mtfp8": (factories.mtfp8_block_scaling_factory, recipe.MTFP8BlockScaling),
}


def made(name: str, *, seed: int = 0, label: str | None = None) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODULES[name](label)


def steps(module: torch.nn.Module, chosen: recipe.Recipe | None, count: int = 1, first: int = 0) -> list[torch.Tensor]:
    """y, gx and parameter gradients of the last of some steps, each with inputs of its own."""
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        module.zero_grad()
        x = (torch.randn(64, 160, generator=generator) * (1 + number)).to(BF16).requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = module(x)
        y.backward(torch.randn(y.shape, generator=generator).to(BF16))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Thousandths:
    """A plain Python quantizer: integers of thousandths."""

    def quantize(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.float() * 1000).round().int(), tensor.dtype

    def dequantize(self, made: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
        return made[0].float() / 1000


def by_role(**quantizers: object) -> object:
    """A factory: a quantizer per tensor type, the rest unquantized."""

    def factory(role: te.QuantizerRole | None) -> object:
        made = quantizers.get(role.tensor_type if role is not None else "")
        return te.IdentityQuantizer() if made is None else made()

    return factory


MIXED = {
    "weight only": by_role(weight=lambda: te.MXFP8Quantizer(E4M3)),
    "forward only": by_role(
        input=lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1), weight=lambda: te.Float8BlockQuantizer(E4M3)
    ),
    "gradients only": by_role(grad_output=lambda: te.Float8CurrentScalingQuantizer(E5M2)),
    "delayed and current": by_role(
        input=te.DelayedScalingRequest, weight=lambda: te.Float8CurrentScalingQuantizer(E4M3), grad_output=Thousandths
    ),
    "delayed gradients": by_role(grad_output=te.DelayedScalingRequest),
}
