"""A recipe by role: a factory chooses the quantizer of every tensor, trained with and compared with a built-in one."""

import torch

import te_hal.modules as te
from te_hal import recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDTH, ROWS, STEPS = 64, 128, 60


def by_role(role: te.QuantizerRole | None) -> te.Quantizer:
    """E4M3, the more precise code, for input and weight; E5M2, the wider one, for output and grad_output.

    The role is None for a result whose consumer the module does not know.
    """
    tensor_type = "output" if role is None else role.tensor_type
    return te.Float8CurrentScalingQuantizer(E5M2 if tensor_type in ("output", "grad_output") else E4M3)


def in_blocks(role: te.QuantizerRole | None) -> te.Quantizer:
    """MXFP8 for the first product of each module, nothing quantized in the second."""
    if role is None or role.name.endswith("fc2"):
        return te.IdentityQuantizer()
    return te.MXFP8Quantizer(E4M3)


class Hundredths:
    """A quantizer in plain Python: all it needs are these two methods."""

    def quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """Whole hundredths."""
        return (tensor.float() * 100).round().to(torch.int32)

    def dequantize(self, hundredths: torch.Tensor) -> torch.Tensor:
        """What products multiply."""
        return hundredths.float() / 100


def weights_in_hundredths(role: te.QuantizerRole | None) -> object:
    """Rounds weights, and nothing else."""
    return Hundredths() if role is not None and role.tensor_type == "weight" else te.IdentityQuantizer()


def train(chosen: recipe.Recipe | None) -> list[float]:
    """Losses of a small regression; None: without FP8."""
    torch.manual_seed(0)
    model = te.LayerNormMLP(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16, name="mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=data))[0]
    losses = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=data)
        target = (x @ rotation).tanh().to(model.fc1_weight)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = model(x.to(target))
        loss = (y - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


RUNS = {
    "bf16": None,
    "built-in current scaling": recipe.Float8CurrentScaling(),
    "the same by role": recipe.CustomRecipe(qfactory=by_role),
    "blocks in one product": recipe.CustomRecipe(qfactory=in_blocks),
    "plain Python weights": recipe.CustomRecipe(qfactory=weights_in_hundredths),
}

print(f"{'run':26}{'first loss':>12}{'last loss':>12}")
for name, chosen in RUNS.items():
    losses = train(chosen)
    print(f"{name:26}{losses[0]:12.5f}{losses[-1]:12.5f}")
