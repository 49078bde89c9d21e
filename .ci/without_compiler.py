"""What an installation without a compiler, a GPU or a driver must still do: import, train, load, and say what it lacks.

Case B98 of the known traps (NVIDIA/TransformerEngine#3381, #1853). Run by .ci/run in such an installation.
"""

import sys
import tempfile
from pathlib import Path

import torch

import te_hal
import te_hal.modules as te
from te_hal import recipe

NATIVE = {
    "cuda": ("CUDA", "GPU", "binding"),
    "musa": ("torch_musa",),
    "musa_emulator": ("the binding of the native backends",),
}


def say_what_is_missing() -> list[str]:
    """Native backends that claim to be usable, or give another reason than what is missing here."""
    rows = {row.name: row for row in te_hal.list_backends()}
    problems = [f"{name} is usable" for name in NATIVE if rows[name].usable]
    for name, words in NATIVE.items():
        print(f"{name}: {rows[name].reason}")
        if not any(word in rows[name].reason for word in words):
            problems.append(f"{name} does not say what is missing")
    return problems


def train_and_load() -> list[str]:
    """Modules on the CPU, a step in FP8, and a checkpoint that comes back."""
    modules = [te.Linear(32, 64), te.LayerNorm(64), te.RMSNorm(64), te.Linear(64, 32)]
    model, again = torch.nn.Sequential(*modules), torch.nn.Sequential(*(type(m)(*_sizes(m)) for m in modules))
    x = torch.randn(16, 32)
    with te.autocast(recipe=recipe.DelayedScaling()):
        model(x).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model.state_dict(), path)
        again.load_state_dict(torch.load(path, weights_only=True))
    with te.autocast(recipe=recipe.DelayedScaling()):
        same = torch.equal(model(x), again(x))
    return [] if same else ["a loaded model gives another result"]


def _sizes(module: torch.nn.Module) -> tuple[int, ...]:
    weight = module.weight
    return (weight.shape[1], weight.shape[0]) if weight.dim() > 1 else tuple(weight.shape)


if __name__ == "__main__":
    found = say_what_is_missing() + train_and_load()
    print(*found, sep="\n")
    sys.exit(1 if found else 0)
