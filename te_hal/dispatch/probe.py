"""Loads each backend in a process of its own: one that crashes or hangs is named, which no single process can do.

The process that loads a backend has TE_HAL_DENY set to all the others, so that what happens is its own doing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from te_hal.dispatch import discovery
from te_hal.dispatch.policy_source import start_policy

#: Begins the line with the answer, among whatever a backend prints.
_MARK = "te_hal list_backends: "

#: Prints what list_backends says of one backend.
_PROGRAM = """
import json, sys
import te_hal
found = [info for info in te_hal.list_backends() if info.name == sys.argv[1]]
print("\\n" + sys.argv[2] + json.dumps([[info.usable, info.reason] for info in found]))
"""


@dataclass(frozen=True)
class Probed:
    """What came of loading a backend.

    Attributes:
        name: of its entry point.
        loads: it came back, usable or not.
        usable: it works on this machine.
        reason: why not; of one that does not load, how its process ended, and what to do.
    """

    name: str
    loads: bool
    usable: bool
    reason: str


def probe_backends(timeout: float = 60.0) -> list[Probed]:
    """Load and ask every installed backend, each in a process of its own; by name. Loads none in this process.

    Args:
        timeout: seconds that one may take, the import of torch included.
    """
    names = sorted(discovery.installed())
    return [_probe(name, [other for other in names if other != name], timeout) for name in names]


def _probe(name: str, others: list[str], timeout: float) -> Probed:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TE_HAL_")}
    environment |= {key: os.environ[key] for key in ("TE_HAL_LIBRARY_PATH", "TE_HAL_EMULATOR") if key in os.environ}
    environment["TE_HAL_DENY"] = ",".join(others)
    command = [sys.executable, "-c", _PROGRAM, name, _MARK]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, with a text of te_hal's own
            command, env=environment, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Probed(name, loads=False, usable=False, reason=f"did not come back in {timeout:g} s; {_leave_out(name)}")
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or len(answers) != 1:
        said = done.stderr.strip().splitlines()[-1:] or [""]
        how = f"ended its process by {ending(done.returncode)}{'' if answers else ', without an answer'}"
        reason = f"{how}{f' ({said[0]})' if said[0] else ''}; {_leave_out(name)}"
        return Probed(name, loads=False, usable=False, reason=reason)
    ((usable, reason),) = json.loads(answers[0].removeprefix(_MARK))
    return Probed(name, loads=True, usable=usable, reason=reason)


def _leave_out(name: str) -> str:
    deny, _ = start_policy()
    return "it is left out" if deny.bars(None, name) == "deny" else f"leave it out with TE_HAL_DENY={name}"


def ending(code: int) -> str:
    """How a process ended, in words: its exit code, or of a negative one the signal."""
    if code >= 0:
        return f"exit code {code}"
    known = {each.value: each.name for each in signal.Signals}  # real-time signals have no names of their own
    return known.get(-code, f"signal {-code}")
