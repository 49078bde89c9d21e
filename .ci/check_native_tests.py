"""Hold a run of the tests to having exercised the native side: nothing of it skipped, and as many tests as there are.

Usage: python .ci/check_native_tests.py JUNIT_REPORT
"""

import sys
from xml.etree import ElementTree as ET

#: Folders of the native side, and the fewest tests that each must have run. Raise them as tests are added.
FEWEST = {"tests.ffi": 2300, "tests.backends.native": 4600, "tests.backends.test_musa": 18}


def main() -> int:
    """Print what was run; 1 if a test was skipped or too few ran."""
    ran = dict.fromkeys(FEWEST, 0)
    skipped = []
    for case in ET.parse(sys.argv[1]).iter("testcase"):  # noqa: S314 - pytest wrote it
        folder = next((name for name in FEWEST if case.get("classname", "").startswith(name)), None)
        if folder is None:
            continue
        if case.find("skipped") is None:
            ran[folder] += 1
        else:
            skipped.append(f"{case.get('classname')}::{case.get('name')}")
    problems = [f"skipped: {name}" for name in skipped]
    problems += [
        f"{name}: {ran[name]} tests ran, at least {count} must" for name, count in FEWEST.items() if ran[name] < count
    ]
    print(*problems, *(f"{name}: {count} tests ran" for name, count in ran.items()), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
