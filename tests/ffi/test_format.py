"""The native sources keep the project's layout (.clang-format)."""

import shutil
import subprocess

import pytest

from te_hal.ffi.sources import source_files

CLANG_FORMAT = shutil.which("clang-format-14")


@pytest.mark.skipif(CLANG_FORMAT is None, reason="no clang-format-14; other versions lay out differently")
def test_native_sources_are_formatted():
    files = [str(file) for file in source_files() if file.name != "te_hal.h"]

    result = subprocess.run([CLANG_FORMAT, "--dry-run", "-Werror", *files], check=False, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr[:3000]


def test_no_native_line_is_longer_than_120():
    for file in source_files():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{file.name}:{number}"
