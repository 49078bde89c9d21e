"""One linear layer in FP8: forward, a loss, backward."""

import torch

import te_hal.modules as te
from te_hal import recipe

in_features, out_features, rows = 768, 3072, 2048

torch.manual_seed(0)
model = te.Linear(in_features, out_features, bias=True)
inputs = torch.randn(rows, in_features, device=model.weight.device)

# Scales come from the largest magnitudes of earlier steps. HYBRID, the default, would use E5M2 for gradients.
fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)

with te.autocast(enabled=True, recipe=fp8_recipe):
    output = model(inputs)

loss = output.sum()
loss.backward()

print(f"output {tuple(output.shape)} {output.dtype}, loss {loss.item():.3f}")
for name, parameter in model.named_parameters():
    print(f"gradient of {name} {tuple(parameter.grad.shape)}: norm {parameter.grad.norm().item():.3f}")
