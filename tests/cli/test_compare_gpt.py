"""`te-hal compare` of the GPT: what is reported beside the losses, and the walk from BF16 to FP8."""

import pytest
from command_line import TINY_GPT, CommandLine

ROLES = ("input", "weight", "grad_output")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    command_line = CommandLine(tmp_path_factory.mktemp("compare"))
    return command_line, command_line.compare(*TINY_GPT, "--layers", "2", "--from", "bf16", "--recipe", "delayed")


def test_the_walk_from_bf16_has_one_fp8_layer_before_all(done):
    command_line, result = done
    assert result.exit_code == 0, result.stderr
    runs = command_line.record()["runs"]
    assert [run["name"] for run in runs] == ["bf16", "bf16-2", "delayed:1", "delayed"]
    layers = [{entry["module"].split(".")[1] for entry in quantized(run)} for run in runs]
    assert layers == [set(), set(), {"1"}, {"0", "1"}]
    assert "delayed:1 cannot be told" in result.stdout


def quantized(run):
    return [entry for entry in run["observed"]["tensors"] if entry["scale"][0] is not None]


def test_amax_scale_and_what_is_cut_off_are_recorded_by_layer_and_role_over_time(done):
    run = done[0].record()["runs"][-1]
    entries = {(entry["module"], entry["role"]): entry for entry in quantized(run)}
    modules = {module for module, _ in entries}
    assert len(modules) >= 4
    assert {role.rpartition(" ")[2] for _, role in entries} == set(ROLES)
    for entry in entries.values():
        assert entry["steps"] == run["observed"]["steps"] == list(range(1, 11))
        for column in ("amax", "scale", "clipped", "flushed"):
            assert len(entry[column]) == 10
            assert all(number >= 0 for number in entry[column])


def test_the_report_has_a_row_per_layer_and_fits_80_columns(done):
    command_line, result = done
    lines = result.stdout.splitlines()
    for module in {entry["module"] for entry in quantized(command_line.record()["runs"][-1])}:
        assert any(line.split()[:1] == [module] for line in lines)
    saved = next(index for index, line in enumerate(lines) if "saved KiB" in line)
    assert lines[saved].split() == ["saved", "KiB", "bf16", "bf16-2", "delayed:1", "delayed"]
    assert any(line.split()[:1] == ["layers.0"] for line in lines[saved:])
    introduction = next(index for index, line in enumerate(lines) if "held-out" in line)
    assert max(len(line) for line in lines[introduction:] if str(command_line.out) not in line) <= 80


def test_every_model_writes(done):
    record = done[0].record()
    assert all(0 < len(run["sample"]) <= 8 for run in record["runs"])
    assert record["prompt"]


def test_the_noise_of_two_seeds_is_in_the_record_and_the_notes(done):
    record = done[0].record()
    first, second = (run["held_out_loss"] for run in record["runs"][:2])
    assert record["held_out_noise"] == pytest.approx(abs(second / first - 1))
    assert "bf16-2: the same with another seed" in done[1].stdout


def test_tokens_are_bytes_of_all_sequences_of_a_step(done):
    for run in done[0].record()["runs"]:
        assert run["tokens_per_second"] == pytest.approx(4 * 16 / run["median_step_seconds"])


def test_a_stopped_gpt_goes_on_to_the_same_numbers(command_line):
    def numbers():
        names = ("loss", "held_out", "gradient_norm", "observed", "sample")
        return [[run[name] for name in names] for run in command_line.record()["runs"]]

    options = (*TINY_GPT, "--steps", "4", "--recipe", "delayed")
    command_line.compare(*options)
    straight = numbers()
    command_line.compare(*options, "--stop-after", "10")
    assert command_line.compare(*options, "--resume").exit_code == 0
    assert numbers() == straight


def test_the_checkpoint_of_the_other_model_is_refused(command_line):
    command_line.compare("--stop-after", "1")
    result = command_line.compare(*TINY_GPT, "--resume")
    assert result.exit_code == 2
    assert "model mlp (now gpt)" in result.stderr


def test_recipes_with_scales_per_block_train_too(command_line):
    names = ["block", "mxfp8", "mtfp8"]
    result = command_line.compare(*TINY_GPT, "--sequence", "32", "--steps", "2", "--recipe", ",".join(names))
    assert result.exit_code == 0, result.stderr
    runs = command_line.record()["runs"][2:]
    assert [run["name"] for run in runs] == names
    for run in runs:
        assert run["sample"]
        assert {entry["role"].rpartition(" ")[2] for entry in run["observed"]["tensors"]} >= set(ROLES)
