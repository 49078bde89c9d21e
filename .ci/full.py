"""Run every test here, the core ones under the oldest supported torch, the kernels' under sanitizers; record all.

Usage: python .ci/full.py --oldest PYTHON_OF_THE_OLDEST_ENVIRONMENT

The record, benchmarks/results/full.json, is meant to be committed. It is written whatever the outcome.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "full.json"
# A test file with one of these words in its stem also runs under the oldest torch: torch's own FP8 cast, and
# what it saves and loads, and its checkpoint of activations changed between versions.
CORE = ("cast", "decode", "amax", "scale", "state", "import", "recompute")
# Ten minutes of random calls on the sanitizers' build.
FUZZING = {"KERNEL_TEST_FUZZ_SECONDS": "600"}
VERSIONS = """
import json, platform
from importlib.metadata import version
print(json.dumps({"python": platform.python_version(),
    **{name: version(name) for name in ("te-hal", "torch", "numpy", "cffi", "pytest")}}))
"""


@dataclass
class Outcome:
    """What one pytest run did, under which versions."""

    name: str
    versions: dict[str, str]
    files: list[str]
    tests: int
    failures: int
    errors: int
    skipped: int
    seconds: float
    exit_status: int


def core_tests(root: Path = ROOT) -> list[str]:
    """Test files for the oldest torch, relative to the repository `root`.

    Raises:
        LookupError: a word of CORE is in no file's stem, so that what it stands for would silently go untested.
    """
    chosen: set[Path] = set()
    for word in CORE:
        found = set((root / "tests").rglob(f"test_*{word}*.py"))
        if not found:
            raise LookupError(f"no test file has {word!r} in its stem")
        chosen |= found
    return sorted(str(file.relative_to(root)) for file in chosen)


def run_suite(name: str, python: str, files: list[str], program: tuple[str, ...] = ("-m", "pytest")) -> Outcome:
    """Run `files` with `python`, slow tests included; `program` is pytest, or what passes its arguments on to it."""
    versions = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True, cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, *program, "-q", "-m", "slow or not slow", f"--junitxml={report}", *files]
        status = subprocess.run(command, check=False, cwd=ROOT, env=os.environ | FUZZING).returncode
        totals = ET.parse(report).getroot()[0].attrib if report.exists() else {}  # noqa: S314  (pytest wrote it)
    return Outcome(
        name=name,
        versions=json.loads(versions.stdout),
        files=files,
        tests=int(totals.get("tests", 0)),
        failures=int(totals.get("failures", 0)),
        errors=int(totals.get("errors", 0)),
        skipped=int(totals.get("skipped", 0)),
        seconds=float(totals.get("time", 0.0)),
        exit_status=status,
    )


def git(*arguments: str) -> str:
    """What git prints in this repository."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def main() -> int:
    """Write the record; 1 unless all runs passed and ran something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oldest", required=True, help="interpreter of the environment with the oldest torch")
    oldest = parser.parse_args().oldest
    core = core_tests()
    outcomes = [
        run_suite("everything", sys.executable, ["tests"]),
        run_suite("core, oldest torch", oldest, core),
        run_suite("kernels, sanitizers", sys.executable, [], (".ci/sanitized.py", "--every-order")),
    ]
    passed = all(outcome.exit_status == 0 and outcome.tests > 0 for outcome in outcomes)
    record = {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "passed": passed,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{'passed' if passed else 'FAILED'}; recorded in {RECORD.relative_to(ROOT)}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
