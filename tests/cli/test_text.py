"""The text of a comparison: how it is cut, what it says of itself, what is refused."""

import gzip
import hashlib
import math
from collections import Counter

import pytest
import torch

from te_hal.cli.text import load_text
from te_hal.schema.errors import ArgumentError

CONTEXT = 64
WORDS = b"The quick brown fox jumps over the lazy dog. " * 40


def write(folder, content):
    path = folder / "text.txt"
    path.write_bytes(content)
    return path


def test_the_last_tenth_is_held_out(tmp_path):
    content = bytes(range(32, 127)) * 20
    text = load_text(write(tmp_path, content), CONTEXT)
    assert bytes(text.train.tolist()) == content[:1710]
    assert bytes(text.held_out.tolist()) == content[1710:]
    assert text.sha256 == hashlib.sha256(content).hexdigest()


def test_without_a_file_it_is_the_python_documentation():
    text = load_text(None, 64)
    assert text.name == "Python documentation topics"
    assert len(text.train) > 100_000
    assert b'The "assert" statement' in bytes(torch.cat([text.train, text.held_out]).tolist())


@pytest.mark.parametrize(("most", "count"), [(8, 8), (20, 16), (10_000, 112)])
def test_held_out_windows_are_distinct_pieces_of_the_held_out_part(tmp_path, most, count):
    text = load_text(write(tmp_path, WORDS), CONTEXT)
    held_out = bytes(text.held_out.tolist())
    windows = text.held_out_windows(CONTEXT + 1, most)
    assert windows.shape == (count, CONTEXT + 1)
    assert all(bytes(window.tolist()) in held_out for window in windows)
    assert bytes(windows[0].tolist()) == held_out[: CONTEXT + 1]
    assert bytes(windows[-1].tolist()) == held_out[-CONTEXT - 1 :]


@pytest.mark.parametrize(("length", "expected"), [(64, WORDS[:48]), (45, WORDS[:44])])
def test_the_prompt_is_the_start_of_the_held_out_part_without_spaces_at_its_end(tmp_path, length, expected):
    assert bytes(load_text(write(tmp_path, WORDS), CONTEXT).prompt(length).tolist()) == expected


def test_the_unigram_loss_is_that_of_counting_bytes(tmp_path):
    text = load_text(write(tmp_path, WORDS), CONTEXT)
    counts = Counter(text.train.tolist())
    held_out = text.held_out.tolist()
    expected = -sum(math.log((counts[byte] + 1) / (len(text.train) + 256)) for byte in held_out) / len(held_out)
    assert text.unigram_loss() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "content",
    [
        "Grüße aus Köln. ".encode() * 100,
        "Grüße aus Köln. ".encode("latin-1") * 100,
        "Привет, мир. ".encode("cp1251") * 100,
        b"tabs\tand\r\nbells of form feed\f and \x1b[1mcolour\x1b[0m " * 40,
    ],
    ids=["utf-8", "latin-1", "cp1251", "terminal log"],
)
def test_text_in_any_8_bit_encoding_is_taken(tmp_path, content):
    assert len(load_text(write(tmp_path, content), CONTEXT).train) == len(content) - len(content) // 10


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (bytes(5000), "not text: 100%"),
        (
            gzip.compress(torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).numpy().tobytes()),
            "not text",
        ),
        ("Grüße aus Köln. ".encode("utf-16") * 100, "not text"),
        (b"x" * 719, "719 bytes"),
    ],
    ids=["empty", "zeros", "gzip", "utf-16", "one byte short"],
)
def test_what_is_no_usable_text_is_refused(tmp_path, content, complaint):
    path = write(tmp_path, content)
    with pytest.raises(ArgumentError, match="--data") as refusal:
        load_text(path, CONTEXT)
    assert complaint in refusal.value.got
    assert str(path) in refusal.value.got


@pytest.mark.parametrize(("name", "reason"), [("missing.txt", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path, name, reason):
    with pytest.raises(ArgumentError, match=reason):
        load_text(tmp_path / name, CONTEXT)


def test_the_shortest_text_is_enough_for_an_fp8_batch(tmp_path):
    text = load_text(write(tmp_path, b"x" * 720), CONTEXT)
    assert len(text.held_out_windows(CONTEXT + 1, 8192)) == 8
