"""What `import te_hal` adds to `import torch`, each measured in fresh interpreters that take turns.

    python benchmarks/import_time.py [--rounds 11]

Goal: at most 0.3 s. The first round of each fills the file cache and does not count.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

import environment_line

PROGRAM = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"
IMPORTS = {
    "torch": "import torch",
    "torch, te_hal": "import torch, te_hal",
    "torch, te_hal, te_hal.modules": "import torch, te_hal, te_hal.modules",
}


def seconds(statement: str) -> float:
    """Time of an import statement in a new interpreter."""
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603 - own text


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    times = [{name: seconds(statement) for name, statement in IMPORTS.items()} for _ in range(rounds + 1)][1:]
    print(environment_line.describe())
    print(f"median of {rounds} interpreters, s")
    medians = {name: statistics.median(row[name] for row in times) for name in IMPORTS}
    for name, value in medians.items():
        print(f"  import {name:32} {value:6.3f}")
    added = statistics.median(row["torch, te_hal"] - row["torch"] for row in times)
    print(f"  {'added by te_hal (goal: 0.3)':39} {added:6.3f}")


if __name__ == "__main__":
    main()
