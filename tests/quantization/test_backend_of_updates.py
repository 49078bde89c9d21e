"""Updates go to the backend of their forward, together; dequantizing to the one in force at its own moment."""

from __future__ import annotations

import torch
from counting_backend import Counting
from small_linear import data, linear

import te_hal
import te_hal.modules as te


def test_the_update_at_the_end_of_an_autocast_goes_to_the_backend_of_the_forward():
    forward, around = Counting("first"), Counting("second")
    module = linear()
    with te_hal.use_backend("second"), te.autocast(), te_hal.use_backend("first"):
        module(data())
    assert forward.count("gemm") == 1
    assert forward.count("update_delayed_scale") == 1
    assert around.count("update_delayed_scale") == 0


def test_the_update_at_the_end_of_a_backward_goes_to_the_backend_of_its_forward():
    forward, later = Counting("first"), Counting("second")
    module = linear()
    with te_hal.use_backend("first"), te.autocast():
        y = module(data())
    assert forward.count("update_delayed_scale") == 1
    with te_hal.use_backend("second"):
        y.sum().backward()
    assert forward.count("update_delayed_scale") == 2
    assert later.launches == []


def test_dequantizing_goes_to_the_backend_in_force_then_and_changes_no_value():
    made, later = Counting("first"), Counting("second")
    with te_hal.use_backend("first"):
        quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
        quantized = quantizer(torch.linspace(-3, 3, 64).view(4, 16))
        expected = quantized.dequantize()
    with te_hal.use_backend("second"):
        values = quantized.dequantize()
    assert torch.equal(values, expected)
    assert (made.count("dequantize"), later.count("dequantize")) == (1, 1)
