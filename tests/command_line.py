"""Calling the command line: in this process, or as a user's shell does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from typer.testing import CliRunner, Result

from te_hal.cli.app import app

#: A comparison of seconds, of the model that is the quicker one to make and train.
TINY = ("--model", "mlp", "--steps", "10", "--width", "32", "--layers", "1", "--batch", "16", "--sample", "8")
#: Added to it, one of the GPT.
TINY_GPT = ("--model", "gpt", "--heads", "2", "--sequence", "16", "--batch", "4")


class CommandLine:
    """`te-hal` with a folder of the test's own as the working folder and as --out."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self._folder = folder
        text = folder / "text.txt"
        text.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(200)))
        self._tiny = ("--out", str(self.out), "--data", str(text), *TINY)

    def call(self, *arguments: str) -> Result:
        """Run it in this process."""
        return CliRunner().invoke(app, arguments)

    def compare(self, *arguments: str) -> Result:
        """Run a tiny comparison in this process; later options replace earlier ones."""
        return self.call("compare", *self._tiny, *arguments)

    def start(self, *arguments: str, program: str | None = None) -> subprocess.Popen[str]:
        """Start a tiny comparison in a process of its own, of this Python program where one is given."""
        start = ["-m", "te_hal.cli"] if program is None else ["-c", program]
        command = [sys.executable, *start, "compare", *self._tiny, *arguments]
        environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self._folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def finish(self, *arguments: str) -> str:
        """Run a tiny comparison in a process of its own to its end; what it printed to stdout."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return output

    def record(self) -> dict:
        """What compare.json holds, read by a parser that takes strict JSON only."""

        def refuse(constant: str) -> None:
            message = f"{constant} is not JSON"
            raise ValueError(message)

        return json.loads((self.out / "compare.json").read_text(), parse_constant=refuse)
