"""te-hal build-kernels: a path on success, the compiler's words and the log on failure."""

import pytest
from typer.testing import CliRunner

from te_hal.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["build-kernels", *arguments])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--target", "abacus"], "abacus"),
        (["--target", "host", "--arch", "mp_31"], "architecture 'mp_31'"),
        (["--target", "cuda", "--sanitizer", "address"], "for the host"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_built_is_refused(arguments, complaint):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert complaint in result.stderr


def test_without_the_musa_sdk_the_error_says_what_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("MUSA_HOME", str(tmp_path))
    result = run("--target", "musa", "--cache", str(tmp_path))
    assert result.exit_code == 1
    assert "mcc" in result.stderr
    assert str(tmp_path) in result.stderr


def test_a_failing_compile_shows_its_last_lines_and_the_log(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho 'error: the sky is falling'\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    result = run("--target", "host", "--cache", str(tmp_path / "cache"))
    assert result.exit_code == 1
    assert "the sky is falling" in result.stderr
    assert "build.log" in result.stderr
