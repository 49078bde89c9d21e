"""The byte counts of a step against counting by hand."""

import pytest
import torch

from te_hal.cli.config import configure
from te_hal.cli.memory import LiveBytes, measure_memory
from te_hal.cli.mlp import EMBEDDING
from te_hal.cli.precision import precision
from te_hal.cli.text import BYTES, load_text

CPU = torch.device("cpu")
CONFIG = configure("mlp", steps=4, width=64, layers=2, batch=32)
GPT = configure("gpt", steps=4, width=64, layers=2, heads=2, sequence=32, batch=16)
MIB = 2**20


def test_live_bytes_follow_what_is_made_kept_and_freed():
    with LiveBytes() as live:
        first = torch.zeros(MIB // 4)
        assert live.now == MIB
        view = first.view(2, -1)[0]
        assert live.now == MIB
        second = first.double()
        del second
        assert (live.now, live.peak) == (MIB, 3 * MIB)
        del first
        assert live.now == MIB
        del view
        assert live.now == 0


def test_views_of_an_ignored_tensor_are_not_counted():
    text = torch.zeros(MIB, dtype=torch.uint8)
    with LiveBytes(ignored=(text,)) as live:
        windows = text.unfold(0, 65, 1)
        assert live.now == 0
        del windows


def inputs_of_linears(width, layers):
    """Elements that the te_hal linear layers read, per window."""
    return CONFIG.sequence * EMBEDDING + layers * (width + 2 * width)


def test_fp8_keeps_one_byte_where_bf16_keeps_two_of_every_linear_input():
    text = load_text(None, CONFIG.sequence)
    bf16 = measure_memory(precision("bf16"), CONFIG, text, CPU)
    elements = CONFIG.batch * inputs_of_linears(CONFIG.width, CONFIG.layers)
    for name in ("delayed", "current"):
        fp8 = measure_memory(precision(name), CONFIG, text, CPU)
        assert bf16.saved_activation_bytes - fp8.saved_activation_bytes == elements, name


def test_parameters_are_counted_in_their_dtype():
    text = load_text(None, CONFIG.sequence)
    width, entry = CONFIG.width, CONFIG.sequence * EMBEDDING
    linears = entry * width + width + CONFIG.layers * (4 * width * width + 3 * width)
    norms = 2 * width * (CONFIG.layers + 1)
    count = linears + norms + BYTES * EMBEDDING + width * BYTES + BYTES
    for name, size in (("bf16", 2), ("fp32", 4)):
        memory = measure_memory(precision(name), CONFIG, text, CPU)
        assert memory.parameter_bytes == size * count
        # Parameters, optimizer, gradients and activations are all there at some time.
        assert memory.peak_bytes > 2 * memory.parameter_bytes + memory.optimizer_bytes


@pytest.mark.parametrize("batch", [8, 16])
def test_activations_are_told_from_the_rest_at_the_smallest_batches_too(batch):
    text = load_text(None, CONFIG.sequence)
    at_32 = measure_memory(precision("delayed"), CONFIG, text, CPU)
    memory = measure_memory(precision("delayed"), configure("mlp", steps=4, width=64, layers=2, batch=batch), text, CPU)
    assert memory.saved_activation_bytes * 32 == at_32.saved_activation_bytes * batch
    assert memory.saved_other_bytes == at_32.saved_other_bytes


def test_measuring_leaves_torch_s_seed_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure_memory(precision("bf16"), CONFIG, load_text(None, CONFIG.sequence), CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("config", [CONFIG, GPT], ids=["mlp", "gpt"])
def test_the_parts_of_the_model_add_up_to_what_is_saved(config):
    memory = measure_memory(precision("bf16"), config, load_text(None, 64), CPU)
    assert sum(memory.saved_by_part.values()) == memory.saved_activation_bytes
    assert memory.saved_by_part["layers.0"] == memory.saved_by_part["layers.1"] > 0
    assert memory.saved_by_part["norm"] > 0


def test_fp8_saves_less_in_every_layer_of_the_gpt():
    text = load_text(None, 64)
    bf16, fp8 = (measure_memory(precision(name), GPT, text, CPU) for name in ("bf16", "current"))
    for part in ("layers.0", "layers.1"):
        # The inputs of qkv, proj and fc1 are width wide, that of fc2 four times.
        assert bf16.saved_by_part[part] - fp8.saved_by_part[part] >= GPT.tokens * 7 * GPT.width // 2
    for part in ("norm", "head", "elsewhere"):
        assert bf16.saved_by_part[part] == fp8.saved_by_part[part]


def test_with_one_layer_in_fp8_that_layer_alone_saves_less():
    text = load_text(None, 64)
    bf16, one = (measure_memory(precision(name), GPT, text, CPU).saved_by_part for name in ("bf16", "current:1"))
    assert [part for part in bf16 if one[part] < bf16[part]] == ["layers.1"]
