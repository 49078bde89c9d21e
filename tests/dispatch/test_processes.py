"""What only another process shows: a plugin package, the environment, a fork, a checkout without metadata."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BACKEND_DOC = Path(__file__).resolve().parents[2] / "docs" / "backends.md"


def run(program: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new interpreter, with folders in front of its path and variables set."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TE_HAL_")}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def install(folder: Path, name: str, source: str, entry_point: str | None = None) -> None:
    """Put a distribution with one module and one entry point into a folder, as pip would."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    stanza = entry_point or f"{name} = {name}:create_backend"
    (info / "entry_points.txt").write_text(f"[te_hal.backends]\n{stanza}\n", encoding="utf-8")


def example_of_the_page() -> tuple[str, str]:
    """The module and the entry point's line that docs/backends.md shows."""
    text = BACKEND_DOC.read_text(encoding="utf-8")
    module = text.split("```python\n", 1)[1].split("```", 1)[0]
    stanza = text.split("```toml\n", 1)[1].split("```", 1)[0].splitlines()[1]
    return module, stanza.replace('"', "")


def test_the_example_of_the_page_is_found_and_used_and_a_broken_neighbour_is_listed(tmp_path: Path) -> None:
    module, stanza = example_of_the_page()
    name = stanza.split("=")[0].strip()
    install(tmp_path, stanza.split("=")[1].split(":")[0].strip(), module, stanza)
    install(tmp_path, "unlucky", "raise OSError('libunlucky.so: cannot open shared object file')\n")
    program = f"""
        import torch, te_hal, te_hal.ops as ops
        rows = {{info.name: info for info in te_hal.list_backends()}}
        print(rows["unlucky"].usable, rows["unlucky"].reason)
        print(rows[{name!r}].usable, rows["cpu_reference"].usable)
        te_hal.set_backend({name!r})
        print(ops.amax(torch.tensor([1.0, float("nan"), -3.0])).tolist())
        te_hal.set_policy(te_hal.Policy(fallback=("cpu_reference",)))
        import warnings; warnings.simplefilter("ignore")
        print(ops.compute_scale(torch.ones(1), fp8_max=448.0).tolist())
        print(te_hal.fallback_report())
    """
    result = run(program, tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("False failed to load from unlucky:create_backend: OSError: libunlucky.so")
    assert lines[1] == "True True"
    assert lines[2] == "[3.0]"
    assert lines[3] == "[448.0]"
    assert lines[4] == f"{{('compute_scale', {name!r}, 'cpu_reference'): 1}}"


def test_two_installed_distributions_with_one_name_are_refused_naming_both(tmp_path: Path) -> None:
    for package in ("chip_one", "chip_two"):
        install(tmp_path, package, "create_backend = None\n", f"chip = {package}:create_backend")
    result = run("import te_hal\nprint([i.reason for i in te_hal.list_backends() if i.name == 'chip'])", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "chip_one with chip_one:create_backend, chip_two with chip_two:create_backend" in result.stdout


def test_a_plain_checkout_without_metadata_names_the_missing_command() -> None:
    program = """
        import importlib.metadata
        real = importlib.metadata.entry_points
        importlib.metadata.entry_points = lambda **k: real(group="no such group")
        import te_hal
        print(te_hal.list_backends())
        te_hal.get_backend()
    """
    result = run(program)
    assert "python setup.py -q egg_info" in result.stdout
    assert "BackendUnavailableError" in result.stderr
    assert "python setup.py -q egg_info" in result.stderr


FIRST_USE = "import te_hal; print('imported'); import torch, te_hal.ops as ops; "


def test_the_environment_forces_a_backend() -> None:
    program = (
        FIRST_USE + "print(te_hal.get_backend().name); te_hal.set_backend(None); print(te_hal.get_backend().name);"
    )
    result = run(program + "te_hal.reset(); print(te_hal.get_backend().name)", TE_HAL_BACKEND=" null ")
    assert result.stdout.split() == ["imported", "null", "cpu_reference", "null"], result.stderr


@pytest.mark.parametrize("where", ["TE_HAL_BACKEND", "TE_HAL_FALLBACK: fallback", "TE_HAL_DENY: deny"])
def test_an_unknown_name_in_the_environment_is_an_error_at_first_use_that_says_the_variable(where: str) -> None:
    result = run(FIRST_USE + "ops.amax(torch.ones(1))", **{where.partition(":")[0]: "muse"})
    assert result.stdout == "imported\n"
    assert f"BackendNotFoundError: {where}: got backend 'muse'; accepted: cpu_reference (usable)" in result.stderr


def test_a_policy_file_and_variables_are_in_force_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('["*"]\nfallback = ["null"]\n[amax]\ndeny = ["cpu_reference"]\nfallback = ["musa_emulator"]\n')
    program = """
        import torch, warnings, te_hal, te_hal.ops as ops
        warnings.simplefilter("ignore")
        ops.amax(torch.ones(1)), ops.compute_scale(torch.ones(1), fp8_max=448.0)
        print(te_hal.fallback_report())
        print(te_hal.explain("amax").how)
    """
    result = run(
        program, TE_HAL_POLICY=str(file), TE_HAL_DENY="compute_scale=cpu_reference", TE_HAL_FALLBACK="amax=null"
    )
    assert result.stdout.splitlines() == [
        "{('amax', 'cpu_reference', 'null'): 1, ('compute_scale', 'cpu_reference', 'null'): 1}",
        "because cpu_reference may not run amax: TE_HAL_POLICY, TE_HAL_DENY, TE_HAL_FALLBACK denies it",
    ], result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "a file that cannot be read (No such file or directory)"),
        ("[gemmm]\n", "got op 'gemmm'; accepted: * or one of "),
        ("amax = 1\n", "got 1 outside of a table"),
    ],
)
def test_a_policy_file_that_is_wrong_ends_the_import_naming_file_and_variable(text, said, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    if text is not None:
        file.write_text(text)
    result = run("import te_hal", TE_HAL_POLICY=str(file))
    assert f"ArgumentError: TE_HAL_POLICY ({file})" in result.stderr
    assert said in result.stderr


def test_a_backend_that_crashes_while_it_loads_is_left_out_by_denying_it(tmp_path: Path) -> None:
    install(tmp_path, "chip_one", "import os\nos.abort()\n", "chip = chip_one:create_backend")
    program = "import te_hal\nprint([i.reason for i in te_hal.list_backends() if i.name == 'chip'])"
    assert run(program, tmp_path).returncode == -6
    result = run(program, tmp_path, TE_HAL_DENY="chip")
    assert result.stdout == "['is not loaded, because TE_HAL_DENY denies it every op']\n", result.stderr


def test_the_environment_lists_fallbacks() -> None:
    program = """
        import torch, warnings, te_hal, te_hal.ops as ops
        from te_hal.dispatch import Backend, register_backend
        warnings.simplefilter("ignore")
        register_backend(Backend(name="empty", kernels={}, serves=frozenset({"cpu"}), supports=None or (lambda c: c)))
        te_hal.set_backend("empty")
        ops.amax(torch.ones(1))
        print(te_hal.get_policy().fallback, te_hal.fallback_report())
    """
    result = run(program, TE_HAL_FALLBACK="null, cpu_reference")
    assert result.stdout == "('null', 'cpu_reference') {('amax', 'empty', 'null'): 1}\n", result.stderr


def test_a_device_backend_in_use_before_a_fork_is_refused_in_the_child() -> None:
    program = """
        import os, sys, torch, te_hal, te_hal.ops
        from te_hal.dispatch import ANY_DEVICE, Backend, current_memo, register_backend, resolve
        from te_hal.schema.support import SUPPORTED, Call

        def amax(input, *, out=None): ...

        register_backend(Backend(
            name="chip", kernels={"amax": amax}, serves=frozenset({ANY_DEVICE}), supports=lambda call: SUPPORTED))
        te_hal.set_backend("chip")

        def ask(device):
            try:
                resolve(Call("amax", torch.device(device), {"input": torch.float32}))
                return "yes"
            except RuntimeError as error:
                return str(error)

        ask("cuda"), ask("cpu")
        te_hal.ops.amax(torch.ones(1))
        memo = current_memo()
        assert memo
        for child in ("first", "second"):
            if os.fork() == 0:
                assert current_memo() is not memo and not current_memo()
                print(child, "cpu:", ask("cpu"), "| xpu:", ask("xpu"), "| cuda:", ask("cuda:1"), flush=True)
                if child == "second" and os.fork() == 0:
                    print("grandchild", "xpu:", ask("xpu"), flush=True)
                    os._exit(0)
                elif child == "second":
                    os.wait()
                os._exit(0)
            os.wait()
        print("parent", ask("cuda"))
    """
    result = run(program)
    lines = result.stdout.splitlines()
    assert len(lines) == 4, result.stderr
    for child, line in zip(("first", "second"), lines, strict=False):
        assert line.startswith(f"{child} cpu: yes | xpu: yes | cuda: backend chip: got a call on cuda:1 in a forked")
        assert "'spawn'" in line
    assert lines[2].startswith("grandchild xpu: backend chip: got a call on xpu in a forked process")
    assert lines[3] == "parent yes"


def test_a_child_forked_during_discovery_discovers_for_itself() -> None:
    program = """
        import os, threading, torch, te_hal
        from te_hal.dispatch import discovery
        loading, forked = threading.Event(), threading.Event()
        load = discovery._load

        def slow_load(*arguments):
            loading.set()
            forked.wait(60)
            return load(*arguments)

        discovery._load = slow_load
        thread = threading.Thread(target=te_hal.list_backends)
        thread.start()
        loading.wait(60)
        if os.fork() == 0:
            forked.set()
            print(te_hal.get_backend().name, flush=True)
            os._exit(0)
        os.wait()
        forked.set()
        thread.join()
    """
    result = run(program)
    assert result.stdout == "cpu_reference\n", result.stderr


def test_importing_te_hal_is_silent_and_loads_nothing_of_the_command_line_or_of_a_backend() -> None:
    program = """
        import sys, torch
        before = set(sys.modules)
        import te_hal
        loaded = set(sys.modules) - before
        heavy = ("typer", "rich", "matplotlib", "numpy", "sympy", "cffi", "torch._dynamo", "torch._inductor")
        heavy += ("te_hal.backends", "te_hal.modules", "te_hal.cli", "te_hal.testing")
        print(sorted(name for name in loaded if name.startswith(heavy)))
    """
    result = run(program)
    assert result.stdout == "[]\n", result.stderr
    assert result.stderr == ""
