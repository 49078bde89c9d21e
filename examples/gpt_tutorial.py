"""A small GPT trained in BF16 and in FP8, from single modules to generated numbers, with plain PyTorch beside it.

    python examples/gpt_tutorial.py --small                         # seconds on a CPU
    python examples/gpt_tutorial.py --small --until-accuracy 0.95   # each run goes on until it has learned
    python examples/gpt_tutorial.py --check       # full size, for an accelerator; compares with recorded losses

The model (gpt_model.py) predicts the next number of arithmetic sequences modulo 96 with strides from 1 to 6: from a
loss of ln 96 = 4.56, to ln 6 = 1.79 once it knows that one of the next six numbers follows, and below as it reads the
stride off what came before. From the third number on the stride is known, so that a model may be right every time: how
often it is, in sequences that it was not trained on, is printed for each run, with the steps that it took.
--until-accuracy goes on beyond --steps until that share is reached. --check trains as the recorded runs did, whose
attention ran across the batch (see Sizes): there it stays near one in six.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpt_model import FULL, SMALL, VOCABULARY, Gpt, Sizes
from torch import nn

import te_hal
import te_hal.modules as te
from te_hal import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

STRIDES = 6
SEED = 0
#: Losses whose mean is compared.
LAST = 20
RECORDED = Path(__file__).resolve().parent.parent / "tests" / "golden" / "curves.json"
#: Run to its name in the record, and how far its mean may be from that of the BF16 run.
CHECKED = {"bf16": ("none", 0.0), "delayed": ("delayed16", 0.01), "current": ("current", 0.005)}
FROM_RECORDED = 0.05
#: Sequences that are held out, the seed that they come from, and the first number that can be known.
HELD_OUT, OTHER_SEED, KNOWN = 64, 1, 2
#: Steps between two looks at these, beyond the steps that were asked for; and after how many of those to give up.
LOOK, MOST = 20, 100


def recipes() -> dict[str, recipe.Recipe | None]:
    """What is compared, by name; None: no FP8."""
    delayed = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    return {"bf16": None, "delayed": delayed, "current": recipe.Float8CurrentScaling()}


def device_in_use() -> torch.device:
    """Where te_hal makes modules: on the device of the backend in force."""
    return te.LayerNorm(8).weight.device


def tour(sizes: Sizes) -> None:
    """Single modules: what they hold, and what FP8 changes in their output."""
    torch.manual_seed(SEED)
    wide = sizes.feed_forward
    modules = {
        f"Linear({sizes.width}, {wide})": te.Linear(sizes.width, wide, params_dtype=torch.bfloat16),
        f"LayerNorm({sizes.width})": te.LayerNorm(sizes.width, params_dtype=torch.bfloat16),
        f"LayerNormLinear({sizes.width}, {wide})": te.LayerNormLinear(sizes.width, wide, params_dtype=torch.bfloat16),
        f"LayerNormMLP({sizes.width}, {wide})": te.LayerNormMLP(sizes.width, wide, params_dtype=torch.bfloat16),
    }
    print(f"\n{'module':28s} {'parameters':>10s} {'output':>14s}   FP8 off by")
    inputs = torch.randn(sizes.sequence, sizes.width, device=device_in_use()).to(torch.bfloat16)
    for name, module in modules.items():
        with torch.no_grad():
            plain = module(inputs)
            with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
                quantized = module(inputs)
        off = (quantized - plain).float().norm() / plain.float().norm()
        count = sum(parameter.numel() for parameter in module.parameters())
        print(f"{name:28s} {count:10d} {tuple(plain.shape)!s:>14s}   {off:.2%}")


def sequences(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Int64 ``[count, length]``: ``(phase + stride * t) mod 96``, with strides from 1 to 6."""
    phase = torch.randint(VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, STRIDES + 1, (count, 1), generator=generator)
    return (phase + stride * torch.arange(length)) % VOCABULARY


def loss_of(model: Gpt, windows: torch.Tensor, chosen: recipe.Recipe | None) -> torch.Tensor:
    """Cross entropy of every next number. Only the forward is under autocast; the backward follows it."""
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@dataclass
class Run:
    """A training and its numbers.

    Attributes:
        model: as trained.
        chosen: recipe; None without FP8.
        losses: of each step.
        milliseconds: median time of a step, the first few left out.
        kept: bytes that a forward keeps for its backward.
        peak: bytes of the device's memory that were taken at once; None on a CPU.
        accuracy: share of the held-out numbers from the third on that it names.
    """

    model: Gpt
    chosen: recipe.Recipe | None
    losses: list[float] = field(default_factory=list)
    milliseconds: float = 0.0
    kept: int = 0
    peak: int | None = None
    accuracy: float = 0.0

    @property
    def last(self) -> float:
        """Mean of the last losses."""
        return statistics.mean(self.losses[-LAST:])


@torch.no_grad()
def held_out_accuracy(run: Run, sizes: Sizes) -> float:
    """How often the likeliest number is the right one, from the third number of sequences never trained on."""
    windows = sequences(HELD_OUT, sizes.sequence + 1, torch.Generator().manual_seed(OTHER_SEED)).to(run.model.device)
    right = []
    for batch in windows.split(sizes.batch):
        with te.autocast(enabled=run.chosen is not None, recipe=run.chosen):
            found = run.model(batch[:, :-1]).argmax(dim=-1)
        right.append((found == batch[:, 1:])[:, KNOWN - 1 :])
    return torch.cat(right).float().mean().item()


def train(sizes: Sizes, chosen: recipe.Recipe | None, *, plain: bool = False, until: float | None = None) -> Run:
    """A model from the same seed as every other, trained on the same data; with ``until`` to that accuracy."""
    torch.manual_seed(SEED)
    device, generator, times = device_in_use(), torch.Generator().manual_seed(SEED), []
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    if accelerator is not None:
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()  # by the models of earlier runs
    run = Run(Gpt(sizes, plain=plain), chosen)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=sizes.learning_rate)
    for step in range(sizes.steps + (0 if until is None else LOOK * MOST)):
        if step >= sizes.steps and (step - sizes.steps) % LOOK == 0 and held_out_accuracy(run, sizes) > (until or 0.0):
            break
        windows = sequences(sizes.batch, sizes.sequence + 1, generator).to(device)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(run.model, windows, chosen)
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())  # which waits for the device
        times.append(1e3 * (time.perf_counter() - start))
    run.accuracy = held_out_accuracy(run, sizes)
    run.milliseconds = statistics.median(times[min(5, sizes.steps // 2) :])
    if accelerator is not None:
        run.peak = accelerator.max_memory_allocated() - before
    optimizer.zero_grad(set_to_none=True)
    run.kept = bytes_kept(run.model, lambda: loss_of(run.model, windows, chosen))
    return run


def bytes_kept(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """What autograd keeps of a forward, parameters left out and no memory counted twice."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def report(runs: dict[str, Run]) -> None:
    """Losses, time and memory side by side."""
    last = f"last {min(LAST, len(runs['bf16'].losses))}"
    columns = ("steps", "held out", "first", last, "vs bf16", "ms/step", "kept MiB", "peak MiB")
    print(f"\n{'run':13s}" + "".join(f"{column:>9s}" for column in columns))
    for name, run in runs.items():
        peak = "-" if run.peak is None else f"{run.peak / 2**20:.0f}"
        alike = len(run.losses) == len(runs["bf16"].losses)
        against = f"{run.last / runs['bf16'].last - 1:+.2%}" if alike else "-"
        print(
            f"{name:13s}{len(run.losses):9d}{run.accuracy:9.1%}{run.losses[0]:9.4f}{run.last:9.4f}{against:>9s}"
            f"{run.milliseconds:9.1f}{run.kept / 2**20:9.1f}{peak:>9s}"
        )


def show_scaling(model: Gpt) -> None:
    """What delayed scaling remembers: the largest magnitudes of past steps, and the scales that follow from them."""
    meta = model.layers[0].self_attention.layernorm_qkv.fp8_meta
    print(f"\nscaling state of the first layer's projection to queries, keys and values\n{meta['recipe']}")
    for direction, roles in (("scaling_fwd", ("input", "weight")), ("scaling_bwd", ("grad_output",))):
        state = meta[direction]
        for slot, role in enumerate(roles):
            history = state.amax_history[1:, slot]
            print(
                f"{role:12s} {state.format.name}: largest of {len(history) + 1} steps {history.max().item():.3g}, "
                f"scale {state.scale[slot].item():.4g}"
            )


@torch.no_grad()
def go_on(run: Run, prompt: torch.Tensor, count: int) -> list[int]:
    """The likeliest ``count`` numbers after a prompt, one at a time.

    FP8 takes rows in multiples of 8: the end is padded, which under the causal mask nothing before it sees.
    """
    found = prompt
    for _ in range(count):
        padded = nn.functional.pad(found, (0, -len(found) % 8))
        with te.autocast(enabled=run.chosen is not None, recipe=run.chosen):
            logits = run.model(padded[None])
        found = torch.cat([found, logits[0, len(found) - 1].argmax().view(1)])
    return found[len(prompt) :].tolist()


def generate(runs: dict[str, Run], sizes: Sizes) -> None:
    """Let every model continue the same sequence."""
    length = sizes.sequence // 2
    right = ((3 + 2 * torch.arange(length + 8)) % VOCABULARY).tolist()
    print(f"\nafter ... {' '.join(map(str, right[length - 4 : length]))} comes {' '.join(map(str, right[length:]))}")
    for name, run in runs.items():
        found = go_on(run, torch.tensor(right[:length], device=run.model.device), 8)
        print(f"{name:13s} goes on {' '.join(map(str, found))}")


def check(runs: dict[str, Run], path: Path) -> bool:
    """Whether the losses are those that were recorded, and FP8 follows BF16."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    print(f"\nmean of the last {LAST} losses beside {path.name}")
    good = True
    for name, (key, from_bf16) in CHECKED.items():
        wanted = statistics.mean(recorded[key]["losses"][-LAST:])
        off, against = runs[name].last / wanted - 1, runs[name].last / runs["bf16"].last - 1
        passed = abs(off) <= FROM_RECORDED and abs(against) <= from_bf16
        good &= passed
        print(
            f"{'pass' if passed else 'FAIL'}  {name:9s} {runs[name].last:.4f}, recorded {wanted:.4f} ({off:+.2%}, "
            f"at most {FROM_RECORDED:.0%}); {against:+.2%} from bf16 (at most {from_bf16:.1%})"
        )
    return good


def main() -> int:
    """Run all parts; 1 if the check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="seconds on a CPU; default: width 768, for an accelerator")
    parser.add_argument("--backend", help="choose one by name; default: the one of the default device")
    parser.add_argument("--steps", type=int, help=f"default: {FULL.steps}, small {SMALL.steps}")
    parser.add_argument("--until-accuracy", type=float, metavar="SHARE", help="go on until more than this is right")
    parser.add_argument("--check", nargs="?", type=Path, const=RECORDED, help="compare with a record of losses")
    parser.add_argument("--json", type=Path, help="write losses and numbers there")
    options = parser.parse_args()
    sizes = SMALL if options.small else FULL
    if options.steps is not None:
        sizes = replace(sizes, steps=options.steps)
    if options.check is not None and sizes != FULL:
        parser.error("--check is for the full size and all steps, which were recorded")
    if options.check is not None and options.until_accuracy is not None:
        parser.error("--check trains as many steps as were recorded, without --until-accuracy")
    if options.check is not None:
        sizes = replace(sizes, as_recorded=True)
    if options.backend is not None:
        te_hal.set_backend(options.backend)

    backend = te_hal.get_backend()
    print(f"backend {backend.name}: {backend.description}; torch {torch.__version__}")
    print(sizes)
    tour(sizes)
    until = options.until_accuracy
    runs = {name: train(sizes, chosen, until=until) for name, chosen in recipes().items()}
    runs["plain PyTorch"] = train(sizes, None, plain=True, until=until)
    report(runs)
    short = [name for name, run in runs.items() if until is not None and run.accuracy <= until]
    if short:
        print(f"{', '.join(short)}: not above {until:.0%} within {sizes.steps + LOOK * MOST} steps")
    show_scaling(runs["delayed"].model)
    generate(runs, sizes)
    if options.json is not None:
        fields = ("losses", "accuracy", "milliseconds", "kept", "peak")
        numbers = {name: {field: getattr(run, field) for field in fields} for name, run in runs.items()}
        options.json.write_text(json.dumps({"backend": backend.name, "runs": numbers}))
    return 1 if short or (options.check is not None and not check(runs, options.check)) else 0


if __name__ == "__main__":
    sys.exit(main())
