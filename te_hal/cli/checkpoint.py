"""The checkpoint of a comparison: one file that is whole, unaltered and of the same configuration, or refused.

========  ==================================================================
8 bytes   magic
2 bytes   format version, little endian
8 bytes   length of the header
32 bytes  SHA-256 of the header
header    JSON: configuration, machine, length and SHA-256 of the payload
payload   torch.save of plain containers and tensors; weights_only=True safe
========  ==================================================================
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_hal.cli.atomic import write_atomically
from te_hal.schema.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"TEHALCMP"
_VERSION = 1
_PREAMBLE = struct.Struct("<8sHQ32s")
_INTACT = "a checkpoint as te-hal compare wrote it"
_START_ANEW = "restore the file, or start anew in another --out"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds.

    Attributes:
        config: everything that decides the numbers, by name; plain values.
        machine: what bit-exact continuation also depends on, by name; plain values.
        state: runs done and the one under way; plain containers and tensors.
    """

    config: dict[str, Any]
    machine: dict[str, Any]
    state: dict[str, Any]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace `path` by a file that holds `checkpoint`.

    Raises:
        OSError: nothing was written; what `path` held is still there.
    """
    buffer = io.BytesIO()
    torch.save(checkpoint.state, buffer)
    payload = buffer.getvalue()
    described = {
        "config": checkpoint.config,
        "machine": checkpoint.machine,
        "payload_bytes": len(payload),
        "payload_sha256": hashlib.sha256(payload).hexdigest(),
    }
    header = json.dumps(described, sort_keys=True).encode()
    preamble = _PREAMBLE.pack(_MAGIC, _VERSION, len(header), hashlib.sha256(header).digest())
    write_atomically(path, preamble + header + payload)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`, which is left as it is.

    Raises:
        CheckpointError: cannot be read, not such a file, of another version, cut short, or altered.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            str(path),
            got=f"a file that cannot be read ({error.strerror})",
            accepted=_INTACT,
            todo="make it readable, or start anew in another --out",
        ) from None
    header, payload = _split(path, content)
    if len(payload) < header["payload_bytes"]:
        raise _refused(path, f"a file cut short: {len(payload)} of {header['payload_bytes']} payload bytes")
    if hashlib.sha256(payload).hexdigest() != header["payload_sha256"]:
        raise _refused(path, "a file whose payload was altered")
    state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    return Checkpoint(header["config"], header["machine"], state)


def _split(path: Path, content: bytes) -> tuple[dict[str, Any], bytes]:
    if content[: len(_MAGIC)] != _MAGIC[: len(content)] or not content:
        raise _refused(path, "a file of another kind" if content else "an empty file")
    if len(content) < _PREAMBLE.size:
        raise _refused(path, f"a file cut short: {len(content)} bytes")
    _, version, length, digest = _PREAMBLE.unpack_from(content)
    if version != _VERSION:
        raise CheckpointError(
            str(path),
            got=f"format version {version}",
            accepted=f"version {_VERSION}",
            todo="resume with the te_hal that wrote it, or start anew in another --out",
        )
    header = content[_PREAMBLE.size : _PREAMBLE.size + length]
    if len(header) < length:
        raise _refused(path, f"a file cut short: {len(header)} of {length} header bytes")
    if hashlib.sha256(header).digest() != digest:
        raise _refused(path, "a file whose header was altered")
    return json.loads(header), content[_PREAMBLE.size + length :]


def _refused(path: Path, got: str) -> CheckpointError:
    return CheckpointError(str(path), got=got, accepted=_INTACT, todo=_START_ANEW)


def check_same(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a checkpoint of another configuration.

    Raises:
        CheckpointError: naming every entry that differs.
    """
    differing = [
        f"{name} {_shown(saved.get(name))} (now {_shown(wanted.get(name))})"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        raise CheckpointError(
            str(path),
            got=f"a checkpoint of another configuration: {'; '.join(differing)}",
            accepted="the options of the run that wrote it",
            todo="repeat those options with --resume, or start anew in another --out",
        )


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
