"""The checkpoint file: whole and unaltered, or refused; never half written."""

import pytest
import torch

from te_hal.cli import atomic
from te_hal.cli.checkpoint import Checkpoint, check_same, read_checkpoint, write_checkpoint
from te_hal.schema.errors import CheckpointError

CONFIG = {"width": 256, "recipes": ["delayed", "current"], "seed": 0}
STATE = {"weights": torch.arange(12, dtype=torch.bfloat16), "losses": [1.5, float("nan")], "current": None}
HEADER_STARTS, MAGIC = 50, 8


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "compare.ckpt"
    write_checkpoint(path, Checkpoint(CONFIG, {"threads": 2}, STATE))
    return path


def test_what_was_written_is_read(path):
    checkpoint = read_checkpoint(path)
    assert checkpoint.config == CONFIG
    assert checkpoint.machine == {"threads": 2}
    assert torch.equal(checkpoint.state["weights"], STATE["weights"])
    assert str(checkpoint.state["losses"]) == "[1.5, nan]"


def test_nothing_else_is_left_in_the_folder(path):
    write_checkpoint(path, Checkpoint(CONFIG, {}, {}))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kept", [0, 4, MAGIC, HEADER_STARTS - 1, HEADER_STARTS, HEADER_STARTS + 9, 600, -1])
def test_a_file_cut_short_is_refused_and_left_alone(path, kept):
    content = path.read_bytes()[:kept]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cut short|empty file") as refusal:
        read_checkpoint(path)
    assert refusal.value.where == str(path)
    assert path.read_bytes() == content


def test_an_altered_byte_anywhere_is_refused(path):
    content = path.read_bytes()
    for position in [*range(HEADER_STARTS + 40), *range(HEADER_STARTS + 40, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"PK\x03\x04 a zip file" * 9, "another kind"), (b"TEHALCMP\x02\x00" + bytes(90), "format version 2")],
    ids=["kind", "version"],
)
def test_a_file_of_another_kind_or_version_is_refused(path, content, complaint):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        read_checkpoint(path)


def test_bytes_after_the_end_are_refused(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="altered"):
        read_checkpoint(path)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\); accepted: a checkpoint"):
        read_checkpoint(tmp_path)


def test_a_failed_write_keeps_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def disk_full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(path, Checkpoint(CONFIG, {}, {}))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_another_configuration_is_refused_by_every_name_that_differs(path):
    wanted = {"width": 128, "recipes": ["delayed"], "seed": 0, "lr": 0.1}
    with pytest.raises(CheckpointError) as refusal:
        check_same(path, CONFIG, wanted)
    assert refusal.value.got == (
        "a checkpoint of another configuration: lr None (now 0.1); recipes delayed,current (now delayed); "
        "width 256 (now 128)"
    )


def test_the_same_configuration_passes(path):
    check_same(path, read_checkpoint(path).config, CONFIG)
