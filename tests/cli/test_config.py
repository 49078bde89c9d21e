"""The options of a comparison: what they may be."""

import pytest

from te_hal.cli.config import configure, split_names
from te_hal.schema.errors import ArgumentError


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("steps", 0, "an integer from 1 to 9223372036854775807"),
        ("steps", -3, "an integer from 1 to 9223372036854775807"),
        ("steps", 2**63, "an integer from 1 to 9223372036854775807"),
        ("layers", 0, "an integer from 1 to 9223372036854775807"),
        ("width", 0, "a positive multiple of 16 up to 9223372036854775807"),
        ("width", 100, "a positive multiple of 16 up to 9223372036854775807"),
        ("width", 2**63, "a positive multiple of 16 up to 9223372036854775807"),
        ("batch", -8, "a positive multiple of 8 up to 9223372036854775807"),
        ("batch", 4, "a positive multiple of 8 up to 9223372036854775807"),
        ("seed", -1, "an integer from 0 to 9223372036854775807"),
        ("seed", 99999999999999999999, "an integer from 0 to 9223372036854775807"),
        ("lr", 0.0, "a finite number above 0"),
        ("lr", float("inf"), "a finite number above 0"),
        ("lr", float("nan"), "a finite number above 0"),
        ("model", "rnn", "gpt, mlp"),
        ("recipes", ("delayed", "fp9"), "delayed, current, block, mxfp8, nvfp4, mtfp8"),
        ("recipes", (), "delayed, current, block, mxfp8, nvfp4, mtfp8"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_option(option, value, accepted):
    with pytest.raises(ArgumentError) as refusal:
        configure(**{"model": "mlp", option: value})
    assert refusal.value.where == f"te-hal compare: --{option.removesuffix('s') if option == 'recipes' else option}"
    assert refusal.value.accepted == accepted


@pytest.mark.parametrize(("width", "nearest"), [(100, 96), (1, 16), (250, 256), (2**63, 2**63 - 16), (-(2**70), 16)])
def test_the_nearest_multiple_is_named(width, nearest):
    with pytest.raises(ArgumentError, match=f"the nearest is {nearest}"):
        configure("mlp", width=width)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["delayed"], ("delayed",)),
        (["delayed,current"], ("delayed", "current")),
        (["current", "delayed"], ("current", "delayed")),
        ([" current , delayed,", "current"], ("current", "delayed")),
        ([""], ()),
    ],
)
def test_names_may_be_repeated_or_separated_by_commas(values, names):
    assert split_names(values) == names


@pytest.mark.parametrize(
    ("model", "option"), [("gpt", "width"), ("gpt", "sequence"), ("mlp", "width"), ("mlp", "batch")]
)
def test_mxfp8_needs_multiples_of_32_where_the_others_need_16_or_8(model, option):
    assert getattr(configure(model, **{option: 48}), option) == 48
    with pytest.raises(ArgumentError, match="a positive multiple of 32"):
        configure(model, **{option: 48}, recipes=("delayed", "mxfp8"))


@pytest.mark.parametrize(("given", "top_k"), [({}, 0), ({"experts": 8}, 2), ({"experts": 1}, 1), ({"experts": 0}, 0)])
def test_a_byte_goes_to_two_experts_where_there_are_as_many(given, top_k):
    assert configure("gpt", **given).top_k == top_k


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("gpt", {"experts": -1}, "--experts: got -1; accepted: an integer from 0"),
        ("gpt", {"experts": 8, "top_k": 9}, "--top-k: got 9, with --experts 8; accepted: a number from 1 to 8"),
        ("gpt", {"experts": 8, "top_k": 0}, "--top-k: got 0, with --experts 8"),
        ("gpt", {"top_k": 2}, "--top-k: got 2, with --experts 0; accepted: --experts too"),
        ("mlp", {"experts": 4}, "--experts: got 4 for --model mlp"),
        ("mlp", {"top_k": 1}, "--top-k: got 1, with --experts 0"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_option(model, given, message):
    with pytest.raises(ArgumentError, match=message):
        configure(model, **given)
