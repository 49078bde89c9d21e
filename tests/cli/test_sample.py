"""What trained models write: any length of what is read fits FP8, and padding changes nothing."""

import pytest
import torch

from te_hal.cli.config import configure
from te_hal.cli.models import KINDS
from te_hal.cli.precision import precision
from te_hal.cli.sample import write_on

CPU = torch.device("cpu")
CONFIGS = {
    "gpt": configure("gpt", width=32, layers=2, heads=2, sequence=16),
    "gpt with experts": configure("gpt", width=32, layers=1, heads=2, sequence=16, experts=4, top_k=2),
    "experts": configure("gpt", width=32, layers=2, heads=2, sequence=16, experts=4),
    "mlp": configure("mlp", width=32, layers=1, sequence=16),
}


def make(config):
    torch.manual_seed(0)
    return KINDS[config.model].build(config, CPU)


@pytest.mark.parametrize("name", ["fp32", "delayed", "current"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_goes_on_from_a_prompt_of_any_length(config, name):
    model = make(config)
    for length in (1, 5, 16, 40):
        with precision(name).autocast():
            text = write_on(model, torch.full((length,), 65, dtype=torch.uint8), 20, CPU)
        assert 0 < len(text) <= 20


def windows_of(text: torch.Tensor, prompt: int, longest: int) -> torch.Tensor:
    """What is read before the next byte: all, or from half a sequence before the end where that did not fit."""
    start = 0
    for end in range(prompt, len(text) + 1):
        if end - start > longest:
            start = end - longest // 2
    return text[start:]


@pytest.mark.parametrize(("kind", "prompt"), [("gpt", 1), ("gpt", 11), ("gpt", 16), ("gpt", 40), ("experts", 11)])
def test_the_gpt_reads_each_byte_once_and_sees_what_it_would_see_without_a_cache(kind, prompt):
    model, reads = make(CONFIGS[kind]), []
    model.register_forward_pre_hook(lambda _, inputs: reads.append(inputs[0].shape[1]))
    text, read = torch.randint(256, (60,)), model.reader()
    for end in range(prompt, 61):
        with torch.no_grad():
            logits = read(text[:end])
            expected = model(windows_of(text[:end], prompt, 16)[None])[0, -1]
        # fp32 sums of other lengths, through two layers.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    cached = reads[::2]
    assert set(cached[1:]) <= {1, 8}  # 8: half a sequence, where a whole one was full


def test_the_window_mlp_reads_the_newest_bytes_alone():
    model = make(CONFIGS["mlp"])
    context = torch.randint(256, (50,))
    assert torch.equal(model.reader()(context), model.reader()(context[-16:]))


def test_the_same_model_writes_the_same():
    model, prompt = make(CONFIGS["gpt"]), torch.full((8,), 65, dtype=torch.uint8)
    assert write_on(model, prompt, 20, CPU) == write_on(model, prompt, 20, CPU)


def test_a_model_of_nan_writes_nothing():
    model = make(CONFIGS["gpt"])
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    assert write_on(model, torch.full((8,), 65, dtype=torch.uint8), 20, CPU) == ""
