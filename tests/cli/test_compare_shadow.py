"""`te-hal compare --shadow`: right training is reported as such, a planted fault ends with its file and exit code 1."""

from planted_fault import one_percent, plant

from te_hal.shadowing import replay

SHORT = ("--steps", "2", "--recipe", "delayed")


def test_a_right_backend_gets_its_counts_and_cost_after_the_report(command_line):
    done = command_line.compare(*SHORT, "--shadow")
    assert done.exit_code == 0, done.stderr
    assert "te_hal.shadow: the backend in force beside cpu_reference" in done.stdout
    assert ", 0 outside their contracts" in done.stdout
    assert "\ncost " in done.stdout


def test_a_sample_compares_a_share_of_the_calls(command_line):
    done = command_line.compare(*SHORT, "--shadow", "--shadow-sample", "0.1")
    counts = next(line for line in done.stdout.splitlines() if "op calls compared" in line)
    compared, _, seen, *_ = counts.replace(",", "").split()
    assert 0.02 < int(compared) / int(seen) < 0.2
    assert command_line.compare(*SHORT, "--shadow", "--shadow-sample", "7").exit_code == 2


def test_a_planted_fault_leaves_a_file_in_out_and_ends_with_1(command_line, recwarn):
    backend = plant("gemm", one_percent, after=30)
    done = command_line.compare(*SHORT, "--shadow", "--backend", backend)
    assert done.exit_code == 1
    assert "first difference: gemm on backend faulty leaves its contract in step" in done.stdout
    (path,) = command_line.out.glob("*.tehalcall")
    assert replay(path).as_saved
    assert [str(warning.message).split()[0] for warning in recwarn] == ["gemm"]
