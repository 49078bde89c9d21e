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


def test_a_name_that_is_given_twice_is_wrong_input(command_line):
    done = command_line.call("explain", "gemm", "a=bf16", "a=e4m3")
    assert done.exit_code == 2
    assert "got a=bf16 and a=e4m3; accepted: each name once" in done.stderr


def test_a_policy_file_is_asked_about(command_line, tmp_path):
    (tmp_path / "policy.toml").write_text('[amax]\ndeny = ["cpu_reference"]\n')
    done = command_line.call("explain", "amax", "--policy", str(tmp_path / "policy.toml"))
    assert "cpu_reference may not run amax: te_hal.use_policy denies it" in done.stdout
    assert te_hal.get_policy() == te_hal.Policy()


def test_a_policy_file_that_is_wrong_is_wrong_input(command_line, tmp_path):
    done = command_line.call("explain", "amax", "--policy", str(tmp_path / "none.toml"))
    assert done.exit_code == 2
    assert "a file that cannot be read" in done.stderr


def test_why_not_prints_what_the_function_answers(command_line):
    done = command_line.call("explain", "gemm", "a=e4m3", "b=e4m3", "--why-not")
    assert done.stdout.rstrip("\n") == str(te_hal.why_not("gemm", a="e4m3", b="e4m3"))
    as_json = command_line.call("explain", "gemm", "--why-not", "--json").stdout
    assert json.loads(as_json) == te_hal.why_not("gemm").as_dict()
    assert command_line.call("explain", "--why-not").exit_code == 2
