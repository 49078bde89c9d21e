"""docs/porting.md, section 6: what each step makes work on a backend alone, and that it doesn't work before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.backends.cpu_reference import create_backend
from te_hal.dispatch import register_backend
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import ScalingMode
from te_hal.schema.storage_kind import StorageKind
from te_hal.schema.support import Code, Support

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
REFERENCE = create_backend()
BF16 = {"params_dtype": torch.bfloat16}
PLAIN = frozenset()
TENSOR = frozenset({ScalingMode.TENSOR})
BLOCKS = frozenset({ScalingMode.BLOCK_1X128, ScalingMode.BLOCK_128X128})
NORMS = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")


def backend_with(ops, modes):
    """cpu_reference's kernels of some ops, for operands of some scaling modes."""

    def supports(call):
        kinds = [kind.mode for kind in call.kinds.values() if isinstance(kind, StorageKind)]
        for mode in [*kinds, *([call.flags["mode"]] if "mode" in call.flags else [])]:
            if mode not in modes:
                return Support.no(Code.MODE, f"has no mode {ScalingMode(mode).value}")
        return REFERENCE.supports(call)

    kernels = {op: REFERENCE.kernels[op] for op in ops}
    return dataclasses.replace(REFERENCE, name="partial", kernels=kernels, supports=supports, default_for=frozenset())


@contextlib.contextmanager
def alone(ops, modes):
    te_hal.reset()
    register_backend(backend_with(ops, modes))
    with te_hal.use_backend("partial"):
        yield
    te_hal.reset()


def train(make, rule=None):
    model = make()
    x = torch.randn(16, 4, 32, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=rule is not None, recipe=rule):
        output = model(x)
    output.float().sum().backward()


LINEAR = functools.partial(te.Linear, 32, 64, **BF16)
MLP = functools.partial(te.LayerNormMLP, 32, 64, normalization="RMSNorm", **BF16)
LAYER = functools.partial(te.TransformerLayer, 32, 64, 2, **BF16)


def read_fp8_weight():
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        weight = LINEAR().weight
    assert weight.dequantize().shape == weight.shape


def attention_with_a_bias():
    attention = te.DotProductAttention(2, 16)
    query, key, value = (torch.randn(8, 1, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 8, 8, dtype=torch.bfloat16)
    output = attention(query, key, value, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    output.float().sum().backward()


#: A row of the page each: the ops and modes that are new, and what runs from then on.
STEPS = {
    "gemm": (("gemm",), PLAIN, [functools.partial(train, LINEAR)]),
    "norm": (NORMS, PLAIN, [functools.partial(train, MLP), functools.partial(train, LAYER)]),
    "current": (
        ("amax", "compute_scale", "quantize"),
        TENSOR,
        [functools.partial(train, make, recipe.Float8CurrentScaling()) for make in (LINEAR, LAYER)],
    ),
    "delayed": (("update_delayed_scale",), PLAIN, [functools.partial(train, LAYER, recipe.DelayedScaling())]),
    "dequantize": (("dequantize",), PLAIN, [read_fp8_weight]),
    "softmax": (("softmax_fwd", "softmax_bwd"), PLAIN, [attention_with_a_bias]),
    "blocks": ((), BLOCKS, [functools.partial(train, LAYER, recipe.Float8BlockScaling())]),
    "mxfp8": ((), {ScalingMode.MXFP8}, [functools.partial(train, LAYER, recipe.MXFP8BlockScaling())]),
}


def at(step):
    """Ops and modes before a step."""
    ops, modes = (), frozenset()
    for name, (more, others, _) in STEPS.items():
        if name == step:
            break
        ops, modes = (*ops, *more), modes | others
    return ops, modes


@pytest.mark.parametrize("step", STEPS)
def test_a_step_makes_work_what_the_page_says_and_it_did_not_before(step):
    ops, modes = at(step)
    more, others, programs = STEPS[step]
    for program in programs:
        with alone(ops, modes), pytest.raises(UnsupportedError):
            program()
        with alone((*ops, *more), modes | others):
            program()


def test_the_page_names_the_ops_of_every_step_in_that_order():
    rows = [row.split("|")[1] for row in re.findall(r"^\| `.*$", PAGE.read_text(), re.MULTILINE)]
    named = [re.findall(r"`(\w+)`", row) for row in rows]
    for (ops, _, _), row in zip(list(STEPS.values())[:6], named, strict=False):
        assert set(ops) <= set(row)
    assert {op for row in named for op in row if op in SCHEMAS} >= {
        op for op, schema in SCHEMAS.items() if not schema.optional
    }
