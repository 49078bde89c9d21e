"""Everything that wants an NVIDIA GPU, in one command, each part in a process and with a time limit of its own.

    python benchmarks/gpu_session.py --out FOLDER [--only NAME ...] [--seconds 540]

Writes session.txt, which has the output of all parts, and what they make beside it, and prints how each ended, with its
last lines. A part that fails or
outlasts its limit leaves the others their turn; so does the end of `--seconds`, which is for machines lent for a while:
parts that no time is left for are named. Status 1 unless every part passed, 2 where backend cuda cannot be used; its
kernel library must have been built (`te-hal build-kernels --target cuda`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

import te_hal
from te_hal.ffi.locations import candidates

ROOT = Path(__file__).resolve().parent.parent
PYTHON, LOG = sys.executable, "session.txt"
#: A part that has less than this left does not start.
LEAST_SECONDS = 10.0


class Part(NamedTuple):
    """One thing to run.

    Attributes:
        name: for --only.
        seconds: after which it is ended.
        command: relative to the root of the checkout; OUT in it stands for the folder.
        shown: how many of its last lines are printed.
    """

    name: str
    seconds: float
    command: list[str]
    shown: int = 3


def parts() -> list[Part]:
    """In the order in which they run: what decides first."""
    tests = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    tutorial = [PYTHON, "examples/gpt_tutorial.py", "--backend", "cuda", "--json"]
    command = [PYTHON, "-m", "te_hal.cli"]
    compare = [*command, "compare", "--backend", "cuda", "--steps", "60", "--out", "OUT/compare"]
    kit = [*command, "conformance", "--backend", "cuda"]
    calls = [PYTHON, "tests/ffi/call_entries.py", "LIBRARY", "--runtime", "RUNTIME"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--tool"]
    return [
        Part("selftest", 90, [*command, "selftest", "--backend", "cuda"], 4),
        Part("kernels", 150, [PYTHON, "benchmarks/gpu.py", "--json", "OUT/kernels.json"], 70),
        Part("transformer", 120, [PYTHON, "benchmarks/gpu_transformer.py", "--json", "OUT/transformer.json"], 90),
        Part("tutorial", 120, [*tutorial, "OUT/tutorial.json", "--check"], 30),
        Part("learned", 90, [*tutorial, "OUT/learned.json", "--until-accuracy", "0.95"], 18),
        Part("streams", 60, [*tests, "tests/backends/native/test_streams.py"]),
        Part("graphs", 90, [*tests, "tests/backends/native/test_graphs.py", "tests/modules/test_cpu_offload.py"]),
        Part("compare", 120, compare, 30),
        Part("conformance", 200, [*kit, "-j", "6", "--json", "OUT/conformance.json"], 30),
        Part("large", 90, [*kit, "--mode", "large"], 30),
        Part("bench", 120, [*command, "bench", "--backend", "cuda", "--json", "OUT/bench.json"], 12),
        Part("entries", 60, calls),
        Part("initcheck", 90, [*sanitizer, "initcheck", *calls]),
        Part("native_tests", 240, [*tests, "-n", "8", "tests/backends/native", "-k", "cuda"], 8),
        *(Part(tool, 90, [*sanitizer, tool, *calls]) for tool in ("memcheck", "racecheck", "synccheck")),
    ]


def resolved(command: list[str], out: Path) -> list[str]:
    """The command with its placeholders filled in.

    Raises:
        LookupError: a program or a library that it needs is missing; says which.
    """
    if shutil.which(command[0]) is None:
        message = f"{command[0]} is not on the path"
        raise LookupError(message)
    places = {"LIBRARY": kernel_library, "RUNTIME": cuda_runtime}
    return [str(places[word]()) if word in places else word.replace("OUT/", f"{out}/") for word in command]


def kernel_library() -> Path:
    """The kernel library that backend cuda would open."""
    for path in candidates("cuda"):
        if path.exists():
            return path
    message = "there is no kernel library for cuda; te-hal build-kernels --target cuda"
    raise LookupError(message)


def cuda_runtime() -> Path:
    """The toolkit's libcudart, or else the one that came with torch."""
    folders = [Path("/usr/local/cuda/lib64"), *(Path(entry) / "nvidia" for entry in sys.path)]
    for folder in folders:
        for path in sorted(folder.rglob("libcudart.so*")) if folder.is_dir() else []:
            return path
    message = "no libcudart.so in /usr/local/cuda or among torch's libraries"
    raise LookupError(message)


def run(part: Part, out: Path, limit: float) -> str:
    """Run a part, add its output to the log and print the last lines; how it ended, empty for well."""
    start, log = time.monotonic(), out / LOG
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n== {part.name}: {' '.join(part.command)}\n")
        file.flush()
        where = file.tell()
        try:
            ended = wait_for(resolved(part.command, out), file, limit)
        except LookupError as error:
            ended = str(error)
    printed = log.read_bytes()[where:].decode("utf-8", errors="replace").splitlines()
    print(f"\n== {part.name}: {ended or 'passed'} ({time.monotonic() - start:.0f} s)")
    print(*printed[-part.shown :], sep="\n", flush=True)
    return ended


def wait_for(command: list[str], file: TextIO, limit: float) -> str:
    """How a command ended that may take ``limit`` seconds and writes to a file."""
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(  # noqa: S603 - the commands above
        command,
        cwd=ROOT,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        status = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"ended after {limit:.0f} s"
    return "" if status == 0 else f"status {status}"


def main() -> int:
    """Run what was asked for."""
    names = [part.name for part in parts()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of them together")
    options = parser.parse_args()
    (backend,) = (found for found in te_hal.list_backends() if found.name == "cuda")
    if not backend.usable:
        print(f"backend cuda cannot be used: {backend.reason}")
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + options.seconds, {}
    for part in parts():
        if part.name in options.only:
            left = end - time.monotonic()
            outcomes[part.name] = "no time left" if left < LEAST_SECONDS else run(part, out, min(part.seconds, left))
    print("\n" + "\n".join(f"{'pass' if not ended else 'FAIL'}  {name} {ended}" for name, ended in outcomes.items()))
    return int(any(outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
