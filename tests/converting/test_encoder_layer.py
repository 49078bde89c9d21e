"""An encoder layer converted as a whole takes torch's masks of numbers, and weights travel both ways."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from closeness import relative_error
from torch import nn

import te_hal
from te_hal import recipe
from te_hal.converting import torch_state_dict

LENGTH, BATCH, HEADS = 6, 2, 4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoder(seed: int = 0) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, HEADS, 64, dropout=0.0, norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False, norm=nn.LayerNorm(32))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = draw(*parameter.shape, seed=seed + number) * 0.3
    return model


def converted(model: nn.Module) -> nn.Module:
    new = copy.deepcopy(model)
    assert "EncoderLayer" in [entry.after for entry in te_hal.convert(new).converted]
    return new


PADDING = torch.tensor([[False] * 5 + [True], [False] * 6])
MASKS: dict[str, dict[str, torch.Tensor]] = {
    "-1e9": {"mask": torch.full((LENGTH, LENGTH), -1e9).triu(1)},
    "least": {"mask": torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)},
    "-inf": {"mask": nn.Transformer.generate_square_subsequent_mask(LENGTH)},
    "numbers": {"mask": draw(LENGTH, LENGTH, seed=5)},
    "one per head": {"mask": draw(BATCH * HEADS, LENGTH, LENGTH, seed=6)},
    "numbers and -inf": {"mask": draw(LENGTH, LENGTH, seed=5).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)},
    "of keys": {"src_key_padding_mask": draw(BATCH, LENGTH, seed=7)},
    "both": {
        "mask": draw(LENGTH, LENGTH, seed=5),
        "src_key_padding_mask": torch.zeros(2, 6).masked_fill(PADDING, -1e9),
    },
}


@pytest.mark.parametrize("case", MASKS)
def test_a_mask_of_numbers_is_added_to_the_scores_as_torch_does(case: str) -> None:
    old, x = encoder(), draw(BATCH, LENGTH, 32, seed=9)
    found = []
    for model in (old, converted(old)):
        leaf = x.clone().requires_grad_()
        y = model(leaf, **MASKS[case])
        y.square().sum().backward()
        found.append((y, leaf.grad))
    for own, other in zip(found[1], found[0], strict=True):
        assert relative_error(own, other) <= 1e-5


@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_numbers_are_added_beside_keys_that_are_hidden_by_bools() -> None:
    old, x = encoder(), draw(BATCH, LENGTH, 32, seed=9)
    flags = {"mask": draw(LENGTH, LENGTH, seed=5), "src_key_padding_mask": PADDING}
    assert relative_error(converted(old)(x, **flags), old(x, **flags)) <= 1e-5


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_mask_that_is_learned_gets_its_gradient(start: float) -> None:
    old, x, grads = encoder(), draw(BATCH, LENGTH, 32, seed=9), []
    for model in (old, converted(old)):
        mask = (draw(LENGTH, LENGTH, seed=5) * start).requires_grad_()
        model(x, mask=mask).square().sum().backward()
        grads.append(mask.grad)
    assert relative_error(grads[1], grads[0]) <= 1e-5


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_least_number_of_a_dtype_hides_as_a_bool_does(dtype: torch.dtype, fp8: bool) -> None:
    model, x = converted(encoder()).to(dtype), draw(BATCH, 16, 32, seed=9).to(dtype)
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    mask = torch.zeros(16, 16, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    with te_hal.modules.autocast(enabled=fp8, recipe=recipe.Float8CurrentScaling()):
        found, expected = (model(x, mask=given) for given in (mask, hidden))
    assert relative_error(found, expected) <= (2e-2 if fp8 else 8 * torch.finfo(dtype).eps)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [lambda model: model, copied, pickled], ids=["itself", "a copy", "pickled"])
def test_what_torchs_model_saved_loads_strictly(way: Any) -> None:
    saved, x = encoder(seed=50), draw(BATCH, LENGTH, 32)
    given = saved.state_dict()
    keys = list(given)
    new = way(converted(encoder()))
    assert not any(new.load_state_dict(given))
    assert list(given) == keys
    assert relative_error(new(x), saved(x)) <= 1e-5
    lone = way(converted(encoder())).layers[1]
    lone.load_state_dict(saved.layers[1].state_dict())
    assert torch.equal(lone.layer.layernorm_mlp.fc2_weight, saved.layers[1].linear2.weight)


def test_a_key_that_torchs_state_dict_lacks_or_has_too_much_is_told() -> None:
    given = encoder().state_dict()
    given["layers.0.linear3.weight"] = given.pop("layers.0.linear1.weight")
    with pytest.raises(RuntimeError, match=r"(?s)layers\.0\.layer\.layernorm_mlp\.fc1_weight.*layers\.0\.linear3"):
        converted(encoder()).load_state_dict(given)


def test_a_state_dict_of_its_own_loads_as_before() -> None:
    saved, new = converted(encoder(seed=50)), converted(encoder())
    new.load_state_dict(saved.state_dict())
    assert all(torch.equal(own, other) for own, other in zip(new.parameters(), saved.parameters(), strict=True))


def test_what_a_converted_model_has_learned_loads_into_torchs() -> None:
    old = encoder(seed=50)
    stream = io.BytesIO()
    torch.save(torch_state_dict(converted(old)), stream)
    stream.seek(0)
    back = encoder()
    back.load_state_dict(torch.load(stream, weights_only=True))
    assert all(torch.equal(own, other) for own, other in zip(back.parameters(), old.parameters(), strict=True))
    lone = torch_state_dict(converted(old).layers[0])
    assert lone.keys() == old.layers[0].state_dict().keys()


def test_a_mask_of_numbers_on_a_device_is_not_waited_for():
    """Nothing on meta can be waited for: looking at a value there is an error."""
    layer = converted(encoder()).to("meta").layers[0]
    with te_hal.use_backend("null"):
        y = layer(torch.empty(BATCH, 16, 32, device="meta"), src_mask=torch.empty(16, 16, device="meta"))
    assert y.shape == (BATCH, 16, 32)
