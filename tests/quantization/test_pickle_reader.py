"""The pickle reader: plain values come out, nothing is imported or called, everything else is refused."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import pytest

from te_hal.quantization.pickle_reader import Made, Name, UnreadablePickleError, read_pickle

KNOWN = {Name("known", "Thing"), Name("builtins", "getattr")}

VALUES = {
    "none": None,
    "numbers": [0, 255, 65535, -(2**31), 2**60, 1.5, float("inf")],
    "flags": (True, False),
    "text": {"a": "x" * 300, "b": "ü"},
    "bytes": [b"", b"x" * 300],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), tuple(range(9))],
    "nested": {"a": {"b": [{"c": ()}]}, 3: "three"},
    "shared": [[1]] * 3,
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_plain_values_are_what_pickle_itself_reads(name, protocol):
    if name == "bytes" and protocol < 3:
        pytest.skip("protocol 2 writes bytes as a call")
    data = pickle.dumps(VALUES[name], protocol)
    assert read_pickle(data, ()) == (VALUES[name], len(data))


def test_reading_starts_and_ends_where_one_pickle_does():
    first, second = pickle.dumps([1]), pickle.dumps({"a": 2})
    value, end = read_pickle(first + second, ())
    assert (value, end) == ([1], len(first))
    assert read_pickle(first + second, (), end) == ({"a": 2}, len(first + second))


def test_a_call_of_a_known_name_is_recorded_and_not_made():
    made, _ = read_pickle(b"\x80\x02cknown\nThing\nK\x07\x85R}X\x01\x00\x00\x00aK\x01sb.", KNOWN)
    assert isinstance(made, Made)
    assert (made.of, made.arguments, made.state) == (Name("known", "Thing"), (7,), {"a": 1})


class _Runs:
    """Pickles as a call."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path):
    target = tmp_path / "touched"
    programs = {
        "system": _Runs(os.system, f"touch {target}"),
        "nested": {"scale": [({"deep": _Runs(os.system, f"touch {target}")},)]},
        "eval": _Runs(eval, f"open({str(target)!r}, 'w')"),
        "open": _Runs(open, str(target), "w"),
        "path": _Runs(Path.touch, target),
    }
    for protocol in (0, 2, 4):
        for name, program in programs.items():
            with pytest.raises(UnreadablePickleError):
                read_pickle(pickle.dumps(program, protocol), KNOWN)
            assert not target.exists(), name


REFUSED = {
    "a name that is not listed": (b"\x80\x02cos\nsystem\n.", "a reference to os.system"),
    "a name from the stack": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "a reference to os.system"),
    "a dotted way to another": (b"\x80\x04\x8c\x05known\x8c\x0eThing.__init__\x93.", "a reference to known"),
    "a name that is no text": (b"\x80\x04K\x01K\x02\x93.", "no text"),
    "an instance (INST)": (b"\x80\x02(X\x01\x00\x00\x00xios\nsystem\n.", "INST"),
    "an object (OBJ)": (b"(cknown\nThing\no.", "OBJ"),
    "an extension code": (b"\x80\x02\x82\x01.", "EXT1"),
    "a call by keywords": (b"\x80\x04cknown\nThing\n)}\x92.", "NEWOBJ_EX"),
    "dropping a value": (b"\x80\x02K\x01K\x020.", "POP"),
    "doubling a value": (b"\x80\x02]2.", "DUP"),
    "a persistent name as text": (b"Px\n.", "PERSID"),
    "a call of a number": (b"\x80\x02K\x01)R.", "no name"),
    "a call of what a call made": (b"\x80\x02cknown\nThing\n)R)R.", "no name"),
    "arguments that are no tuple": (b"\x80\x02cknown\nThing\n]R.", "no name"),
    "a state for a list": (b"\x80\x02]}b.", "takes none"),
    "a second state": (b"\x80\x02cknown\nThing\n)R}b}b.", "takes none"),
    "an unknown memory": (b"\x80\x02h\x07.", "nothing remembered"),
    "a memory behind the mark": (b"\x80\x02(\x94.", "empty stack"),
    "items across a mark": (b"\x80\x02](a.", "empty stack"),
    "items for a dict": (b"\x80\x02}K\x01a.", "no list"),
    "pairs for a list": (b"\x80\x02]K\x01K\x02s.", "no dict"),
    "half a pair": (b"\x80\x02}(K\x01u.", "no dict"),
    "a list as key": (b"\x80\x02}]K\x02s.", "neither text nor number"),
    "nothing": (b"", "exhausted"),
    "no end": (b"\x80\x02K\x01", "exhausted"),
    "no value": (b"\x80\x02.", "0 values"),
    "two values": (b"\x80\x02K\x01K\x02.", "2 values"),
    "no mark": (b"\x80\x02u.", "no mark"),
    "a later protocol": (b"\x80\x06N.", "protocol 6"),
    "no pickle": (b"\xff\xff\xff", "xff"),
    "text longer than the bytes": (b"\x80\x02X\xff\xff\xff\x7fabc.", "2147483647"),
    "bytes longer than memory": (b"\x80\x04B\xff\xff\xff\xffabc.", "4294967295"),
    "a number longer than the bytes": (b"\x80\x02\x8a\xff\x01.", "not enough data"),
    "a list of 2**63 bytes": (b"\x80\x05\x96" + struct.pack("<Q", 2**63) + b".", "BYTEARRAY8|maxsize|bytearray8"),
    "endless instructions": (b"\x80\x02" + b"]" * 100_001 + b".", "more than 100000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_program_is_refused_with_what_it_asked_for(name):
    program, words = REFUSED[name]
    with pytest.raises(UnreadablePickleError, match=words):
        read_pickle(program, KNOWN)


def test_what_refers_to_itself_is_read_and_no_walk_is_needed():
    loop, _ = read_pickle(b"\x80\x02]q\x00h\x00a.", ())
    assert loop[0] is loop


def test_what_doubles_at_every_step_takes_no_more_memory_than_its_bytes():
    bomb = b"\x80\x02)" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(200)) + b"."
    assert len(bomb) < 2000
    read_pickle(bomb, ())


def test_every_truncation_of_a_pickle_is_refused():
    whole = pickle.dumps({"a": [1, 2.5, "text", b"bytes", (None, True)]}, 4)
    for length in range(len(whole)):
        with pytest.raises(UnreadablePickleError):
            read_pickle(whole[:length], ())
