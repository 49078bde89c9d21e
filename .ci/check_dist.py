"""Hold a wheel and a source archive to carrying the whole package and nothing else.

Usage: python .ci/check_dist.py DIST_FOLDER
"""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {".py", ".pyi", ".typed", ".toml", ".md", ".h", ".mu", ".muh", ".cpp", ".in"}


def package_files(folder: Path, name: str) -> set[str]:
    """Files under `folder` that an installation must hold, as paths from `name` on; links are followed."""
    found: set[str] = set()
    for entry in folder.iterdir():
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            found |= package_files(entry, path)
        elif entry.suffix in SHIPPED:
            found.add(path)
    return found


def problems(dist: Path) -> list[str]:
    """What is missing from, or does not belong in, the one wheel and the one source archive in `dist`."""
    (wheel,) = dist.glob("te_hal-*.whl")
    (sdist,) = dist.glob("te_hal-*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}

    expected = package_files(ROOT / "te_hal", "te_hal")
    found = [f"{wheel.name}: lacks {name}" for name in sorted(expected - in_wheel)]
    found += [f"{sdist.name}: lacks {name}" for name in sorted(expected - in_sdist)]
    found += [
        f"{wheel.name}: installs {name} outside te_hal"
        for name in sorted(in_wheel)
        if not (name.startswith("te_hal/") or name.split("/")[0].endswith(".dist-info"))
    ]
    return found


def main() -> int:
    """Print every problem; 1 if there is one."""
    found = problems(Path(sys.argv[1]))
    if found:
        print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
