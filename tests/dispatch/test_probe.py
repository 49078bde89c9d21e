"""Each plugin is loaded in a process of its own: one that crashes, hangs or leaves is named, the others are asked."""

import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from te_hal.dispatch import Probed, discovery, probe, probe_backends, registry

MODULES = {
    "aborts": "import os\nos.abort()\n",
    "hangs": "import time\ntime.sleep(600)\n",
    "leaves": "import os\nos._exit(3)\n",
    "leaves_quietly": "import os\nos._exit(0)\n",
    "raises": "print('hello')\nraise OSError('libchip.so.1 is missing')\n",
    "works": "import atexit\nprint('hello')\natexit.register(print, 'good bye')\n",
}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch) -> None:
    """Installed distributions, one per module, and nothing else."""
    for name, source in MODULES.items():
        (tmp_path / f"{name}_chip.py").write_text(source)
        info = tmp_path / f"{name}_chip-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}_chip\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[te_hal.backends]\n{name} = {name}_chip:create_backend\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    points = [EntryPoint(name, f"{name}_chip:create_backend", discovery.GROUP) for name in MODULES]
    monkeypatch.setattr(discovery.metadata, "entry_points", lambda *, group: points)  # noqa: ARG005


#: In place of the real program, which imports torch.
QUICK = "import sys; __import__(sys.argv[1] + '_chip'); print(sys.argv[2] + '[[true, \"\"]]')"


@pytest.mark.usefixtures("plugins")
def test_a_backend_that_crashes_hangs_or_leaves_is_named_and_the_others_are_asked(monkeypatch) -> None:
    monkeypatch.setattr(probe, "_PROGRAM", QUICK)
    before = registry.REGISTRY.tables
    found = {probed.name: probed for probed in probe_backends(timeout=3.0)}
    assert registry.REGISTRY.tables is before
    assert "ended its process by SIGABRT" in found["aborts"].reason
    assert found["aborts"].reason.endswith("leave it out with TE_HAL_DENY=aborts")
    assert found["hangs"].reason.startswith("did not come back in 3 s")
    assert "ended its process by exit code 3" in found["leaves"].reason
    assert found["leaves_quietly"].reason.startswith("ended its process by exit code 0, without an answer")
    assert found["works"] == Probed("works", loads=True, usable=True, reason="")
    assert [probed.loads for probed in found.values()] == [False, False, False, False, False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("plugins")
def test_what_a_backend_says_of_itself_comes_back_and_the_others_are_not_loaded() -> None:
    found = probe._probe("raises", ["aborts", "hangs", "leaves", "leaves_quietly", "works"], 60.0)
    reason = "failed to load from raises_chip:create_backend: OSError: libchip.so.1 is missing"
    assert found == Probed("raises", loads=True, usable=False, reason=reason)
