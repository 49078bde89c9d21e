"""Ops whose contract is exact: a kernel gives the bytes of cpu_reference, whatever the shape, values and order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from hard_values import COPIES, EMPTY, FORMATS, PATTERNS, SHAPES, draw
from native_backends import assert_same_storage, same

import te_hal
from te_hal import ops
from te_hal.schema.formats import E4M3, E5M2, FLOATS, ElementFormat

if TYPE_CHECKING:
    from native_backends import NativeBackend

REFERENCE = "cpu_reference"


def assert_same_cast(
    native: NativeBackend, x: torch.Tensor, format: ElementFormat, copies: str, scale: float = 3.7
) -> None:
    rowwise, columnwise, order = COPIES[copies]
    flags = {"dtype": format.dtype, "rowwise": rowwise, "columnwise": columnwise, "columnwise_order": order}
    factor, amax = torch.tensor([scale]), torch.tensor([0.25])
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(x, factor, amax=amax, **flags)
    own_amax = native.put(torch.tensor([0.25]))
    with native.use():
        found = ops.quantize(native.put(x), native.put(factor), amax=own_amax, **flags)
        decoded = ops.dequantize(found)
    assert_same_storage(found, expected)
    assert same(own_amax, amax)
    with te_hal.use_backend(REFERENCE):
        assert same(decoded, ops.dequantize(expected))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize_and_dequantize(
    shape: tuple[int, ...], dtype: torch.dtype, pattern: str, ordered: NativeBackend
) -> None:
    x = draw(shape, dtype, pattern)
    for target, copies in itertools.product(FORMATS, COPIES):
        assert_same_cast(ordered, x, target, copies)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_a_tensor_without_elements_is_cast_and_leaves_the_amax(shape: tuple[int, ...], native: NativeBackend) -> None:
    for copies in COPIES:
        assert_same_cast(native, torch.zeros(shape), E4M3, copies)


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-38, 3e38, float("inf"), float("nan")])
def test_every_scale(scale: float, native: NativeBackend) -> None:
    assert_same_cast(native, draw((13, 64), torch.float32, "any bits"), E4M3, "row + transposed", scale)


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_that_start_anywhere(dtype: torch.dtype, offset: int, native: NativeBackend) -> None:
    buffer = draw((offset + 40 * 72,), dtype, "any bits")
    view = native.put(buffer)[offset:].view(40, 72)
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(buffer[offset:].view(40, 72), torch.ones(1), dtype=E4M3.dtype, columnwise=True)
        amax = ops.amax(buffer[offset:])
    with native.use():
        assert_same_storage(ops.quantize(view, native.put(torch.ones(1)), dtype=E4M3.dtype, columnwise=True), expected)
        assert same(ops.amax(view), amax)


def test_outputs_that_start_anywhere(native: NativeBackend) -> None:
    x = draw((40, 72), torch.bfloat16, "wide")
    with te_hal.use_backend(REFERENCE):
        expected = ops.quantize(x, torch.ones(1), dtype=E4M3.dtype, columnwise=True)
    out = native.put(expected)
    for name in ("rowwise_data", "columnwise_data"):
        shape = getattr(out, name).shape
        setattr(out, name, native.put(torch.zeros(shape.numel() + 5, dtype=torch.uint8))[5:].view(shape))
    with native.use():
        assert ops.quantize(native.put(x), native.put(torch.ones(1)), dtype=E4M3.dtype, columnwise=True, out=out) is out
    assert_same_storage(out, expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY], ids=str)
def test_amax(shape: tuple[int, ...], dtype: torch.dtype, pattern: str, ordered: NativeBackend) -> None:
    x = draw(shape, dtype, pattern)
    with te_hal.use_backend(REFERENCE):
        expected = ops.amax(x)
    with ordered.use():
        assert same(ops.amax(ordered.put(x)), expected)


@pytest.mark.parametrize("start", [0.0, 1e9, float("inf"), float("nan")])
def test_amax_into_a_running_maximum(start: float, native: NativeBackend) -> None:
    x, out = draw((13, 37), torch.bfloat16, "wide"), torch.tensor([start])
    own = native.put(out)
    with te_hal.use_backend(REFERENCE):
        ops.amax(x, out=out)
    with native.use():
        ops.amax(native.put(x), out=own)
    assert same(own, out)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 2.0])
def test_compute_scale(epsilon: float, power_of_2: bool, ordered: NativeBackend) -> None:
    amax = draw((40, 40), torch.float32, "any bits").abs()
    flags = {"fp8_max": E4M3.max, "epsilon": epsilon, "power_of_2": power_of_2, "value_for_inf": 1e30}
    with te_hal.use_backend(REFERENCE):
        expected = ops.compute_scale(amax, **flags)
    with ordered.use():
        assert same(ops.compute_scale(ordered.put(amax), **flags), expected)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("reduces", [False, True])
def test_update_delayed_scales(reduces: bool, algorithm: str, ordered: NativeBackend) -> None:
    shapes = [(1, 1), (4, 3), (16, 300), (1024, 5), (3, 0), *[(4, 2)] * 90]
    histories = [draw(shape, torch.float32, "any bits", seed).abs() for seed, shape in enumerate(shapes)]
    for history in histories[::3]:
        history[0] = 0.0
    factors = [draw(shape[1:], torch.float32, "wide", 1000 + seed).abs() for seed, shape in enumerate(shapes)]
    reduced = [draw(s[1:], torch.float32, "wide", 2000 + i).abs() for i, s in enumerate(shapes)] if reduces else None
    maxima = [(E4M3, E5M2)[index % 2].max for index in range(len(shapes))]
    own = [[ordered.put(t) for t in tensors] for tensors in (histories, factors, reduced or [])]
    flags = {"fp8_maxima": maxima, "margin": 1, "amax_compute_algo": algorithm}
    with te_hal.use_backend(REFERENCE):
        ops.update_delayed_scales(histories, factors, reduced_amaxes=reduced, **flags)
    with ordered.use():
        ops.update_delayed_scales(own[0], own[1], reduced_amaxes=own[2] or None, **flags)
    assert all(same(a, b) for a, b in zip((*own[0], *own[1]), (*histories, *factors), strict=True))


def test_histories_and_scales_with_gaps_are_updated_where_they_lie(native: NativeBackend) -> None:
    rooms = [draw((4, 6), torch.float32, "wide", seed).abs() for seed in range(2)]
    own = [native.put(room) for room in rooms]
    for backend, (first, second) in ((REFERENCE, rooms), (native.name, own)):
        with te_hal.use_backend(backend):
            ops.update_delayed_scales([first[:, ::2]], (second[0, ::2],), fp8_maxima=(E4M3.max,))
    assert all(same(a, b) for a, b in zip(own, rooms, strict=True))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize(("length", "count"), [(1, 1), (4, 3), (16, 300), (1024, 5)])
def test_update_delayed_scale(length: int, count: int, reduces: bool, algorithm: str, ordered: NativeBackend) -> None:
    generator = torch.Generator().manual_seed(length)
    history = draw((length, count), torch.float32, "any bits").abs()
    history[torch.rand(history.shape, generator=generator) < 0.3] = 0.0
    given = (history, draw((count,), torch.float32, "wide").abs())
    reduced = draw((count,), torch.float32, "wide", seed=5).abs() if reduces else None
    own, own_reduced = [ordered.put(t) for t in given], ordered.put(reduced)
    flags = {"fp8_max": E5M2.max, "margin": 1, "amax_compute_algo": algorithm}
    for _ in range(3):
        with te_hal.use_backend(REFERENCE):
            ops.update_delayed_scale(*given, reduced_amax=reduced, **flags)
        with ordered.use():
            ops.update_delayed_scale(*own, reduced_amax=own_reduced, **flags)
        assert same(own[0], given[0])
        assert same(own[1], given[1])
        given[0][0] = own[0][0] = 1.5
