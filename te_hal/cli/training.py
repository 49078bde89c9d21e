"""One run: a model trained in one precision, step by step, able to stop after any step and go on later."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

import te_hal
from te_hal.cli.models import KINDS
from te_hal.cli.observed import joined
from te_hal.cli.optimizer import MasterAdamW
from te_hal.cli.results import RunResult
from te_hal.cli.sample import write_on

if TYPE_CHECKING:
    from te_hal.cli.config import CompareConfig
    from te_hal.cli.precision import Precision
    from te_hal.cli.text import Text
    from te_hal.monitoring import Monitor

#: Predictions that an evaluation is made of, the same ones every time.
HELD_OUT_TOKENS = 8192
_EVALUATIONS = 10
_TOKENS_AT_ONCE = 1024
_OBSERVATIONS = 40
_WARM_UP_SHARE = 0.05
_LAST_LR_SHARE = 0.05


class Run:
    """A model, its optimizer, its place in the data, and what they have produced.

    Args:
        precision: what differs between runs.
        config: what they share. All runs of a seed start from the same weights and see the same batches.
        text: what to train on.
        device: where.
    """

    def __init__(self, precision: Precision, config: CompareConfig, text: Text, device: torch.device) -> None:
        self._precision, self._config, self._device = precision, config, device
        self.result = RunResult(precision.name, str(precision.recipe) if precision.recipe else None, config.steps)
        seed = config.seed + precision.more_seed
        torch.manual_seed(seed)
        # On the CPU, so that every backend starts from the same numbers.
        self.model = KINDS[config.model].build(config, torch.device("cpu"))
        self.model.fp8_layers = precision.fp8_layers(config.layers)
        self.optimizer = MasterAdamW(self.model, precision.dtype, device)
        length = config.sequence + 1
        self._windows = text.train.unfold(0, length, 1)
        self._tokens_per_window = config.tokens // config.batch
        self._held_out = text.held_out_windows(length, HELD_OUT_TOKENS // self._tokens_per_window)
        self._prompt = text.prompt(config.sequence)
        self._order = torch.Generator().manual_seed(seed)
        self._monitor: Monitor | None = None

    def watch(self) -> None:
        """Have te_hal.monitor record about forty steps of the run; measured runs go without."""
        self._monitor = te_hal.monitor(
            self.model,
            every=max(1, self._config.steps // _OBSERVATIONS),
            nonfinite="report",
            steps_done=self.result.steps,
        )

    @property
    def evaluation_is_due(self) -> bool:
        """Whether the held-out loss belongs to the step just done: ten times per run, the last step included."""
        every = max(1, self._config.steps // _EVALUATIONS)
        return self.result.finished or self.result.steps % every == 0

    def step(self) -> None:
        """One optimizer step on the next batch, recorded in `result`."""
        started = time.perf_counter()
        lr = learning_rate(self.result.steps, self._config)
        loss = self.loss(self.windows(self._config.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._monitor is not None:
            self._monitor.step()
        gradients = self.optimizer.step(lr)
        self.result.record(
            loss=loss.item(),
            gradient_norm=gradients.norm,
            lr=lr,
            nonfinite=gradients.nonfinite,
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss in nats per byte, computed as in training; recorded in `result`."""
        chunks = torch.split(self._held_out, max(1, _TOKENS_AT_ONCE // self._tokens_per_window))
        self.model.eval()
        total = sum(self.loss(chunk).item() * len(chunk) for chunk in chunks)
        self.model.train()
        loss = total / len(self._held_out)
        self.result.held_out.append((self.result.steps, loss))
        return loss

    @torch.no_grad()
    def finish(self) -> None:
        """After the last step: let the model write, and stop watching."""
        self.model.eval()
        with self._precision.autocast():
            self.result.sample = write_on(self.model, self._prompt, self._config.sample, self._device)
        self.model.train()
        self._keep_observations()

    def _keep_observations(self) -> None:
        """Move what the monitor has seen into the result; watching starts anew if there is more to come."""
        if self._monitor is None:
            return
        self._monitor.close()
        self.result.observed = joined(self.result.observed, self._monitor.history())
        self._monitor = None
        if not self.result.finished:
            self.watch()

    def windows(self, count: int) -> torch.Tensor:
        """The next `count` windows in the run's order: uint8 `[count, sequence + 1]`."""
        return self._windows[torch.randint(len(self._windows), (count,), generator=self._order)]

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy, in nats, of the windows' bytes that the model predicts, given the bytes before them."""
        windows = windows.to(self._device, torch.int64)
        with self._precision.autocast():
            logits = self.model(windows[:, :-1])
        predicted = windows[:, windows.shape[1] - logits.shape[1] :]
        return cross_entropy(logits.flatten(0, 1).float(), predicted.flatten())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, and the result so far; shares the tensors' memory."""
        self._keep_observations()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self._order.get_state(),
            "random": torch.get_rng_state(),
            "result": self.result.as_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the run that `state_dict` was taken from."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._order.set_state(state["order"])
        torch.set_rng_state(state["random"])
        self.result = RunResult.from_dict(state["result"])


def learning_rate(step: int, config: CompareConfig) -> float:
    """The rate of step `step` (from 0): a short linear rise, then half a cosine down to a twentieth."""
    rise = min(1.0, (step + 1) / max(1.0, _WARM_UP_SHARE * config.steps))
    fall = _LAST_LR_SHARE + (1 - _LAST_LR_SHARE) * (1 + math.cos(math.pi * step / config.steps)) / 2
    return config.lr * rise * fall
