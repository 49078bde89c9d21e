"""Every call of an op counts once, under who ran it."""

import threading

import pytest
import torch
from stub_backends import refuse, stub

import te_hal
import te_hal.modules as te
from te_hal import Policy, ops
from te_hal.dispatch import Runs, call_counts, register_backend, resolve
from te_hal.dispatch.calls import counting
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError
from te_hal.schema.op import REQUIRED
from te_hal.schema.support import Call

X = torch.ones(4, 8)


def counts() -> dict[tuple[str, str, str], int]:
    return {(each.op, each.runs.value, each.backend): each.calls for each in call_counts()}


def test_calls_count_by_op_and_backend_whatever_the_dtype() -> None:
    for _ in range(3):
        ops.amax(X)
    ops.amax(X.bfloat16())
    with te_hal.use_backend("null"):
        ops.amax(X)
    assert counts() == {("amax", "kernel", "cpu_reference"): 4, ("amax", "kernel", "null"): 1}


def test_a_composed_op_and_its_parts_each_count() -> None:
    ops.activation_quantize(X, activation="gelu", dtype=torch.float8_e4m3fn, scale=torch.ones(1), amax=torch.zeros(1))
    assert counts() == {
        ("activation_quantize", "composition", "cpu_reference"): 1,
        ("activation_fwd", "composition", "cpu_reference"): 1,
        ("quantize", "kernel", "cpu_reference"): 1,
    }


def test_a_fallback_counts_under_both_names_with_its_reason() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    with te_hal.use_backend("picky"), te_hal.use_policy(Policy(fallback=("null",))):
        with pytest.warns(te_hal.dispatch.FallbackWarning):
            ops.amax(X)
        ops.amax(X)
    (only,) = call_counts()
    assert (only.runs, only.backend, only.instead_of, only.calls) == (Runs.FALLBACK, "null", "picky", 2)
    assert only.reason == "it is Sunday"


def test_a_call_that_is_refused_does_not_count() -> None:
    ops.amax(X)
    with pytest.raises(ArgumentError):
        ops.amax(X, out=torch.zeros(2))
    assert counts() == {("amax", "kernel", "cpu_reference"): 1}


def test_a_kernel_that_a_plan_keeps_counts_when_it_runs_and_not_when_it_is_found() -> None:
    kernel = resolve(Call("amax", torch.device("cpu"), {"input": torch.float32, "out": None})).kernel
    assert counts() == {}
    kernel(X)
    assert counts() == {("amax", "kernel", "cpu_reference"): 1}


@pytest.mark.parametrize("op", SCHEMAS)
def test_a_counting_kernel_has_the_ops_signature_and_passes_every_argument(op) -> None:
    """Defaults of the schema included; held against a function that takes anything."""
    passed = []
    count = [0]
    kernel = counting(op, lambda *args, **kwargs: passed.append((args, kwargs)), count)
    needed = [name for name, _, default in SCHEMAS[op].signature if default is REQUIRED]
    kernel(**{name: name for name in needed})
    args, kwargs = passed[0]
    names = [name for name, by_keyword, _ in SCHEMAS[op].signature if not by_keyword]
    due = {name: name if default is REQUIRED else default for name, _, default in SCHEMAS[op].signature}
    assert {**dict(zip(names, args, strict=True)), **kwargs} == due
    assert count == [1]
    with pytest.raises(TypeError, match="unexpected keyword"):
        kernel(**{name: name for name in needed}, colour="red")


def test_modules_count_their_products_forward_and_backward() -> None:
    layer = te.Linear(8, 16)
    for _ in range(2):
        layer(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert counts()["gemm", "kernel", "cpu_reference"] == 6


def test_calls_of_many_threads_all_count() -> None:
    ops.amax(X)
    threads = [threading.Thread(target=lambda: [ops.amax(X) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts() == {("amax", "kernel", "cpu_reference"): 4001}


def test_the_reference_of_a_shadow_does_not_count() -> None:
    with te_hal.use_backend("musa_emulator"), te_hal.shadow():
        ops.amax(X)
    assert counts() == {("amax", "kernel", "musa_emulator"): 1}


def test_reset_brings_counts_back_to_zero_for_kernels_that_are_kept_too() -> None:
    kernel = resolve(Call("amax", torch.device("cpu"), {"input": torch.float32, "out": None})).kernel
    kernel(X)
    te_hal.reset()
    assert call_counts() == []
    kernel(X)
    assert counts() == {("amax", "kernel", "cpu_reference"): 1}
