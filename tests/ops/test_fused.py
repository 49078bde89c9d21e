"""The fused ops as compositions: what Transformer Engine's fused kernels wrote, and brute force for what they lack."""

from __future__ import annotations

import golden_values
import numpy as np
import pytest
import torch

from te_hal import ops

RECORDED = golden_values.load("fused")
DELAYED_SCALE = 0.7
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def arguments(quantizer: str) -> dict[str, torch.Tensor]:
    return {"scale": torch.tensor([DELAYED_SCALE]), "amax": torch.zeros(1)} if quantizer == "delayed" else {}


def assert_as_recorded(storage, recorded, given, units):
    assert torch.equal(storage.rowwise_data, recorded["data"])
    assert torch.equal(storage.columnwise_data, recorded["transpose"])
    for found, wanted in (
        (storage.rowwise_scale_inv, recorded["scale_inv"]),
        (given.get("amax"), recorded.get("amax")),
    ):
        if found is not None and wanted is not None:
            np.testing.assert_array_max_ulp(found.numpy(), wanted.numpy(), maxulp=units)
    assert storage.dtype == torch.bfloat16


def per_tensor(prefix: str) -> list[str]:
    return [case for case in RECORDED.cases(prefix) if case.split("/")[-1] in {"delayed", "current"}]


@pytest.mark.parametrize("case", per_tensor("norm/"))
def test_a_fused_norm_writes_the_recorded_bytes(case: str) -> None:
    _, norm, _, zero_centered, quantizer = case.split("/")
    recorded, given = RECORDED.case(case), arguments(quantizer)
    affine = [recorded[name] for name in ("weight", "bias") if name in recorded]
    storage, *statistics = getattr(ops, f"{norm}_quantize")(
        recorded["x"], *affine, **given, zero_centered_gamma=zero_centered == "zc=True", dtype=E4M3, columnwise=True
    )
    assert_as_recorded(storage, recorded, given, units=1)
    np.testing.assert_array_max_ulp(statistics[-1].numpy(), recorded["rsigma"].numpy(), maxulp=2)


@pytest.mark.parametrize("case", per_tensor("act/"))
def test_a_fused_activation_writes_the_recorded_bytes(case: str) -> None:
    _, activation, _, quantizer = case.split("/")
    recorded, given = RECORDED.case(case), arguments(quantizer)
    storage = ops.activation_quantize(recorded["x"], **given, activation=activation, dtype=E4M3, columnwise=True)
    assert_as_recorded(storage, recorded, given, units=1)


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_a_fused_gelu_gradient_writes_the_recorded_bytes_and_bias_gradient(quantizer: str) -> None:
    recorded, given = RECORDED.case(f"dbias_dgelu/bfloat16/{quantizer}"), arguments(quantizer)
    storage, grad_bias = ops.activation_bwd_quantize(
        recorded["g"], recorded["x"], **given, activation="gelu", bias_grad=True, dtype=E5M2, columnwise=True
    )
    assert_as_recorded(storage, recorded, given, units=1)
    assert torch.equal(grad_bias, recorded["dbias"])


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_a_fused_bias_gradient_writes_the_recorded_bytes(quantizer: str) -> None:
    recorded, given = RECORDED.case(f"bgrad_quantize/bfloat16/{quantizer}"), arguments(quantizer)
    storage, grad_bias = ops.bias_grad_quantize(recorded["g"], **given, dtype=E5M2, columnwise=True)
    assert_as_recorded(storage, recorded, given, units=0)
    assert torch.equal(grad_bias, recorded["dbias"])


def test_a_bias_gradient_is_given_only_where_it_is_asked_for() -> None:
    x = torch.randn(4, 8)
    assert ops.activation_bwd_quantize(x, x, activation="relu", dtype=E5M2)[1] is None


@pytest.mark.parametrize("power_of_2", [False, True])
def test_current_scaling_in_one_op_is_max_over_amax_and_a_cast(power_of_2: bool) -> None:
    x = torch.tensor([[0.5, -3.0], [float("nan"), 1.25]])
    storage = ops.quantize_current(x, dtype=E4M3, columnwise=True, power_of_2=power_of_2)
    scale = 128.0 if power_of_2 else np.float32(448.0) / np.float32(3.0)
    codes = (x * scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
    known = ~x.isnan()
    assert torch.equal(storage.rowwise_data[known], codes[known])
    assert storage.rowwise_scale_inv.item() == np.float32(1.0) / np.float32(scale)
    assert torch.equal(storage.columnwise_data, storage.rowwise_data.t())


def test_the_floor_of_amax_scales_a_small_tensor() -> None:
    storage = ops.quantize_current(torch.full((2, 2), 1e-6), dtype=E4M3, amax_epsilon=1.0)
    assert storage.rowwise_scale_inv.item() == np.float32(1.0) / np.float32(448.0)
