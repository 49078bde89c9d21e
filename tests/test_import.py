"""Importing te_hal: it changes nothing of torch's, says nothing, and brings no library of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Prints the attributes of torch's modules and classes that the import replaced, removed or added to a class.
_PATCHES = """
import sys, torch
def everything():
    owners = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}
    owners |= {f"class {c.__name__}": c for c in (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.Generator)}
    return {name: dict(vars(owner)) for name, owner in owners.items() if hasattr(owner, "__dict__")}
before = everything()
import te_hal, te_hal.modules, te_hal.recipe
after = everything()
gone = object()
changed = [
    f"{owner}.{name}" for owner, held in before.items() for name, value in held.items()
    if after[owner].get(name, gone) is not value
]
added = [f"{owner}.{name}" for owner in before if "class " in owner for name in after[owner].keys() - before[owner]]
print(changed + added)
"""

#: Prints what a program may have set before the import, before and after.
_SETTINGS = """
import random, numpy, torch
def settings():
    return (
        torch.initial_seed(), torch.get_rng_state().sum().item(), random.getstate(),
        numpy.random.get_state()[1].tolist(), torch.get_default_dtype(), torch.get_default_device(),
        torch.get_num_threads(), torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
    )
torch.manual_seed(7)
before = settings()
import te_hal, te_hal.modules, te_hal.recipe
print(settings() == before)
"""


def python(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("what", ["te_hal", "te_hal.modules", "te_hal.recipe", "te_hal.ops", "te_hal.quantization"])
def test_it_prints_nothing_and_warns_of_nothing(what):
    done = python(f"import torch, warnings; warnings.simplefilter('error'); import {what}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_patches_nothing_of_torch():
    done = python(_PATCHES)
    assert done.stdout == "[]\n", done.stderr


def test_it_leaves_seeds_threads_and_defaults_alone():
    done = python(_SETTINGS)
    assert done.stdout == "True\n", done.stderr


def test_it_brings_neither_the_command_line_nor_a_kernel_library():
    names = "{'te_hal.cli', 'typer', 'rich', 'matplotlib', 'cffi', 'te_hal.ffi._native'}"
    done = python(f"import sys, te_hal, te_hal.modules; print({names} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr
