"""te_hal.monitor is there when asked for, and costs `import te_hal` nothing."""

import subprocess
import sys

import pytest

import te_hal
from te_hal.monitoring import monitor


def test_it_is_the_public_name():
    assert te_hal.monitor is monitor
    assert "monitor" in te_hal.__all__


def test_importing_te_hal_loads_neither_it_nor_the_modules():
    program = "import sys, te_hal; print({'te_hal.monitoring', 'te_hal.modules'} & set(sys.modules)); te_hal.monitor"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'watch'"):
        _ = te_hal.watch
