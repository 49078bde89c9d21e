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


def test_what_the_gpt_reads_is_padded_at_its_end_where_the_causal_mask_hides_it():
    model = make(CONFIGS["gpt"])
    context = torch.randint(256, (11,))
    expected = model(context[None])[0, -1]  # unpadded, as unquantized layers take any length
    # fp32 sums of other lengths, through two layers.
    torch.testing.assert_close(model.next_logits(context), expected, rtol=1e-4, atol=1e-5)


def test_only_the_newest_bytes_are_read_when_there_are_more_than_the_model_takes():
    model = make(CONFIGS["gpt"])
    context = torch.randint(256, (50,))
    assert torch.equal(model.next_logits(context), model.next_logits(context[-16:]))


def test_the_same_model_writes_the_same():
    model, prompt = make(CONFIGS["gpt"]), torch.full((8,), 65, dtype=torch.uint8)
    assert write_on(model, prompt, 20, CPU) == write_on(model, prompt, 20, CPU)


def test_a_model_of_nan_writes_nothing():
    model = make(CONFIGS["gpt"])
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    assert write_on(model, torch.full((8,), 65, dtype=torch.uint8), 20, CPU) == ""
