"""`te-hal explain`."""

import json

import te_hal
from te_hal.schema.catalog import SCHEMAS


def test_the_command_prints_what_the_function_answers(command_line):
    done = command_line.call("explain", "gemm", "a=e4m3", "b=e4m3", "layout=dgrad")
    assert done.exit_code == 0
    assert done.stdout.rstrip("\n") == str(te_hal.explain("gemm", a="e4m3", b="e4m3", layout="dgrad"))


def test_without_an_op_there_is_a_line_for_each(command_line):
    lines = command_line.call("explain", "--backend", "null").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEMAS)
    assert all(line.split()[1].startswith("null") for line in lines)


def test_the_json_is_the_explanation(command_line):
    found = json.loads(command_line.call("explain", "amax", "input=fp16", "--json").stdout)
    assert found == json.loads(json.dumps(te_hal.explain("amax", input="fp16").as_dict()))


def test_a_word_without_a_value_is_wrong_input(command_line):
    done = command_line.call("explain", "gemm", "a")
    assert done.exit_code == 2
    assert "name=value" in done.stderr
