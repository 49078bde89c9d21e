"""Follow docs/porting.md to the letter: run its commands, make its edits, look for what it says will be printed.

Usage: python .ci/follow_porting.py [--python INTERPRETER]

The interpreter, this one unless given, is that of an environment in which te_hal, pip, setuptools and pytest are
installed; the walk installs its backend there. Works in a folder of its own, which it removes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "porting.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_EDITS = {
    "new": re.compile(r"^New file `([^`]+)`:$"),
    "instead": re.compile(r"^In `([^`]+)`, instead of `([^`]+)`:$"),
    "below": re.compile(r"^In `([^`]+)`, below `([^`]+)`:$"),
    "remove": re.compile(r"^In `([^`]+)`, remove:$"),
    "end": re.compile(r"^At the end of `([^`]+)`:$"),
}


@dataclass(frozen=True)
class Step:
    """A block of the page and what is to be done with it.

    Attributes:
        action: "run", "expect", or an edit's name.
        text: the block.
        file: which file an edit is of; empty for the others.
        line: the line that an edit refers to.
    """

    action: str
    text: str
    file: str = ""
    line: str = ""


def steps(page: str) -> Iterator[Step]:
    """The steps of a page, in order.

    Raises:
        ValueError: a block that is neither run, nor looked for, nor told where it goes.
    """
    end = 0
    for block in _BLOCK.finditer(page):
        before = page[end : block.start()].strip().rsplit("\n\n", 1)[-1].strip()
        end = block.end()
        language, text = block[1], block[2]
        if language in ("sh", "text"):
            yield Step("run" if language == "sh" else "expect", text)
            continue
        found = next(((name, match) for name, rule in _EDITS.items() if (match := rule.match(before))), None)
        if found is None:
            message = f"a {language} block without a line that says where it goes; above it: {before!r}"
            raise ValueError(message)
        yield Step(found[0], text, *found[1].groups())


def edited(step: Step, content: str) -> str:
    """A file's text after an edit.

    Raises:
        ValueError: what the edit refers to is not there once.
    """
    if step.action == "new":
        return step.text
    if step.action == "end":
        return content + step.text
    if step.action == "remove":
        _once(step.file, content, step.text)
        return content.replace(step.text, "")
    (line,) = [line for line in content.splitlines(keepends=True) if line.strip() == step.line] or [""]
    _once(step.file, content, line or step.line)
    indented = textwrap.indent(step.text, line[: len(line) - len(line.lstrip())])
    return content.replace(line, line + indented if step.action == "below" else indented)


def _once(file: str, content: str, part: str) -> None:
    if content.count(part) != 1:
        message = f"{file}: {content.count(part)} times {part!r}"
        raise ValueError(message)


def lacking(expected: str, printed: str) -> list[str]:
    """Lines of a text block that were not printed; ``...`` stands for anything in a line."""
    found = []
    for line in expected.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        if line.strip() and not re.search(f"^{pattern}$", printed, flags=re.MULTILINE):
            found.append(line)
    return found


class Walk:
    """Someone who follows the page: a working folder, and what was printed last."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self._printed = ""

    def take(self, step: Step) -> list[str]:
        """Do a step; what is wrong, in lines."""
        if step.action == "run":
            return self._run(step.text)
        if step.action == "expect":
            wrong = lacking(step.text, self._printed)
            return [f"not printed: {line}" for line in wrong] + ([self._printed] if wrong else [])
        path = self.folder / step.file
        path.write_text(edited(step, path.read_text() if path.exists() else ""))
        return []

    def _run(self, script: str) -> list[str]:
        """Run a block; the folder that it ends in is the next one's."""
        place = self.folder / ".place"
        whole = f"set -euo pipefail\n{script}\npwd >'{place}'\n"
        done = subprocess.run(
            ["bash", "-c", whole], cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        self._printed = done.stdout + done.stderr
        if done.returncode:
            return [f"ended with {done.returncode}: {script}", self._printed]
        ended_in = place.read_text().strip()
        place.unlink()
        self.folder = Path(ended_in)
        return []


def environment_of(python: Path, scratch: Path) -> dict[str, str]:
    """Variables under which `python` and `te-hal` are those of an interpreter; a te-hal is made where it has none."""
    path = [str(python.parent)]
    if not (python.parent / "te-hal").exists():
        shim = scratch / "bin" / "te-hal"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{python}" -m te_hal.cli "$@"\n')
        shim.chmod(0o755)
        path.append(str(shim.parent))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TE_HAL_", "PYTHON"))}
    return {**kept, "PATH": ":".join([*path, kept.get("PATH", "")]), "PYTHON": str(python)}


def follow(python: Path) -> list[str]:
    """Walk from the first block to the last, or to the first that goes wrong."""
    with tempfile.TemporaryDirectory() as folder:
        walk = Walk(Path(folder), environment_of(python, Path(folder)))
        for step in steps(PAGE.read_text(encoding="utf-8")):
            first = step.text.strip().partition("\n")[0]
            print(f"{step.action} {step.file} {first}", flush=True)
            wrong = walk.take(step)
            if wrong:
                return wrong
    return []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    # Not resolved: a virtual environment's interpreter is a link.
    problems = follow(parser.parse_args().python.absolute())
    print(*problems, sep="\n")
    sys.exit(1 if problems else 0)
