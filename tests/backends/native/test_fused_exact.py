"""Fused casts of what is given: a kernel gives the bytes of cpu_reference, whatever the shape, values and order."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch
from closeness import relative_error
from hard_values import COPIES, EMPTY, FORMATS, PATTERNS, SHAPES, copy_flags, draw
from native_backends import assert_same_storage, same

import te_hal
from te_hal import ops
from te_hal.dispatch import forced_backend, resolve
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ScalingMode
from te_hal.schema.fused import BIAS_GRAD_QUANTIZE, QUANTIZE_CURRENT
from te_hal.schema.validate import describe_call

if TYPE_CHECKING:
    from native_backends import NativeBackend

    from te_hal.schema.op import OpSchema

REFERENCE = "cpu_reference"
#: amax_epsilon, power_of_2
RULES = {"plain": (0.0, False), "powers of two": (0.0, True), "floor": (64.0, False), "both": (64.0, True)}
#: Shape, dtype and pattern: everything for small tensors, one of the hardest for large ones.
_MANY = 100_000
CASES = [
    (shape, dtype, pattern)
    for shape, dtype, pattern in itertools.product([*SHAPES, *EMPTY], FLOATS, PATTERNS)
    if math.prod(shape) < _MANY or (dtype, pattern) == (torch.bfloat16, "any bits")
]
GIVEN = {"a given scale": True, "a scale of its own": False}


def rule_flags(rule: str) -> dict[str, object]:
    return dict(zip(("amax_epsilon", "power_of_2"), RULES[rule], strict=True))


def assert_same_current(native: NativeBackend, x: torch.Tensor, **flags: object) -> None:
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize_current(x, **flags)
    with native.use():
        assert_same_storage(ops.quantize_current(native.put(x), **flags), expected)


@pytest.mark.parametrize(("shape", "dtype", "pattern"), CASES, ids=str)
def test_quantize_current(shape: tuple[int, ...], dtype: torch.dtype, pattern: str, ordered: NativeBackend) -> None:
    x = draw(shape, dtype, pattern)
    for target, copies in itertools.product(FORMATS, COPIES):
        assert_same_current(ordered, x, dtype=target.dtype, **copy_flags(copies))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", FORMATS, ids=lambda target: target.name)
def test_what_shapes_a_scale_of_its_own(target: object, rule: str, ordered: NativeBackend) -> None:
    for factor, pattern in itertools.product((1e-30, 1.0, 1e30), PATTERNS):
        x = draw((13, 72), torch.float32, pattern) * factor
        assert_same_current(ordered, x, dtype=target.dtype, columnwise=True, **rule_flags(rule))


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_that_start_anywhere(dtype: torch.dtype, offset: int, native: NativeBackend) -> None:
    buffer = draw((offset + 40 * 72,), dtype, "any bits")
    view, own = buffer[offset:].view(40, 72), native.put(buffer)[offset:].view(40, 72)
    flags = {"dtype": E4M3.dtype, "columnwise": True}
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize_current(view, **flags), ops.bias_grad_quantize(view, **flags)[0]
    with native.use():
        assert_same_storage(ops.quantize_current(own, **flags), expected[0])
        assert_same_storage(ops.bias_grad_quantize(own, **flags)[0], expected[1])


def test_what_is_not_contiguous_is_cast_as_it_reads(native: NativeBackend) -> None:
    x = draw((72, 40), torch.bfloat16, "wide").t()
    flags = {"dtype": E4M3.dtype, "columnwise": True}
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize_current(x, **flags)
    with native.use():
        own = native.put(x.t()).t()
        assert_same_storage(ops.quantize_current(own, **flags), expected)
        assert_same_storage(ops.bias_grad_quantize(own, **flags)[0], expected)


def test_a_storage_is_refilled_wherever_its_codes_start(native: NativeBackend) -> None:
    x = draw((40, 72), torch.bfloat16, "wide")
    flags = {"dtype": E4M3.dtype, "columnwise": True}
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize_current(x, **flags)
    out = native.put(expected)
    for name in ("rowwise_data", "columnwise_data"):
        shape = getattr(out, name).shape
        setattr(out, name, native.put(torch.zeros(shape.numel() + 5, dtype=torch.uint8))[5:].view(shape))
    with native.use():
        assert ops.quantize_current(native.put(x), out=out, **flags) is out
    assert_same_storage(out, expected)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(("shape", "dtype", "pattern"), [case for case in CASES if len(case[0]) == 2], ids=str)
def test_the_codes_beside_a_bias_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, pattern: str, given: str, ordered: NativeBackend
) -> None:
    x, scale, amax = draw(shape, dtype, pattern), torch.tensor([3.7]), torch.tensor([0.25])
    for index, copies in enumerate(COPIES):
        flags = {"dtype": FORMATS[index % 2].dtype, **copy_flags(copies)}
        own = {"scale": ordered.put(scale), "amax": ordered.put(amax)} if GIVEN[given] else {}
        reference = {"scale": scale, "amax": amax.clone()} if GIVEN[given] else {}
        with te_hal.use_backend(REFERENCE):
            expected, _ = ops.bias_grad_quantize(x, **reference, **flags)
        with ordered.use():
            found, _ = ops.bias_grad_quantize(ordered.put(x), **own, **flags)
        assert_same_storage(found, expected)
        assert not own or same(own["amax"], reference["amax"])


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 264), (136, 264), (600, 2048)], ids=str)
def test_the_sums_beside_the_codes(
    shape: tuple[int, int], dtype: torch.dtype, given: str, ordered: NativeBackend
) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = ordered.put(torch.ones(1)) if GIVEN[given] else None
    with ordered.use():
        _, sums = ops.bias_grad_quantize(ordered.put(grad), scale, dtype=E5M2.dtype)
    assert sums.dtype == dtype
    exact = grad.double().sum(0)
    assert relative_error(sums.cpu(), exact) <= BIAS_GRAD_QUANTIZE.contract.bound[dtype]


@pytest.mark.parametrize("schema", [QUANTIZE_CURRENT, BIAS_GRAD_QUANTIZE], ids=lambda schema: schema.name)
def test_the_kernel_is_the_librarys(schema: OpSchema, native: NativeBackend) -> None:
    names = {name: default for name, _, default in schema.signature}
    first = next(iter(names))
    with native.use():
        call = describe_call(schema, {**names, first: native.put(torch.ones(8, 16)), "dtype": E4M3.dtype})
        assert inspect.unwrap(resolve(call).kernel) is inspect.unwrap(forced_backend().kernels[schema.name])


@pytest.mark.parametrize("mode", [ScalingMode.BLOCK_1X128, ScalingMode.MXFP8])
def test_scales_per_block_are_left_to_the_composition(mode: ScalingMode, native: NativeBackend) -> None:
    names = {name: default for name, _, default in BIAS_GRAD_QUANTIZE.signature}
    grad = {"grad_output": native.put(torch.ones(128, 128)), "dtype": E4M3.dtype, "mode": mode}
    with native.use():
        answer = forced_backend().supports(describe_call(BIAS_GRAD_QUANTIZE, {**names, **grad}))
    assert not answer
