"""What Transformer Engine recorded (tests/golden/README.md), by the kernels of the native backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import golden_values
import numpy as np
import pytest
import torch
from closeness import relative_error
from golden_modules import CASES, bound_of, compared, distance, state_agrees
from golden_modules import run as run_module
from native_backends import assert_nearly_same_codes, same

from te_hal import ops
from te_hal.schema.formats import E4M3, E5M2, ElementFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from native_backends import NativeBackend

    from te_hal.schema.storage import QuantizedStorage

QUANTIZERS = golden_values.load("quantizers")
FUNCTIONAL = golden_values.load("functional")
FUSED = golden_values.load("fused")
STATE = golden_values.load("state")
BY_NAME = {"e4m3": E4M3, "e5m2": E5M2}

#: Behind a norm or an activation: units in the last place of fp32.
ULP = 2


def per_tensor(prefix: str) -> list[str]:
    """Recorded cases with one scale per tensor."""
    return [case for case in FUSED.cases(prefix) if case.split("/")[-1] in {"delayed", "current"}]


@pytest.mark.parametrize("case", QUANTIZERS.cases("delayed/"))
def test_a_given_scale(case: str, native: NativeBackend) -> None:
    recorded = QUANTIZERS.case(case)
    _, _, name, scale = case.split("/")
    running = native.put(torch.zeros(1))
    with native.use():
        given = native.put(recorded["x"]), native.put(torch.tensor([float(scale)]))
        storage = ops.quantize(*given, amax=running, dtype=BY_NAME[name].dtype, columnwise=True)
        decoded = ops.dequantize(storage)
    assert same(storage.rowwise_data, recorded["data"])
    assert same(storage.columnwise_data, recorded["transpose"])
    assert same(storage.rowwise_scale_inv, recorded["scale_inv"])
    assert same(running, recorded["amax"])
    assert same(decoded, recorded["dequant"])


@pytest.mark.parametrize("case", QUANTIZERS.cases("special/"))
def test_special_values(case: str, native: NativeBackend) -> None:
    recorded = QUANTIZERS.case(case)
    running = native.put(torch.zeros(1))
    with native.use():
        given = native.put(recorded["x"]), native.put(torch.ones(1))
        storage = ops.quantize(*given, amax=running, dtype=BY_NAME[case.split("/")[1]].dtype)
    assert same(storage.rowwise_data, recorded["data"])
    assert same(running, recorded["amax"])


@pytest.mark.parametrize("case", QUANTIZERS.cases("current/"))
def test_a_scale_of_its_own(case: str, native: NativeBackend) -> None:
    recorded = QUANTIZERS.case(case)
    _, _, name, power_of_2, epsilon, _ = case.split("/")
    flags = {"power_of_2": power_of_2 == "pow2=True", "amax_epsilon": float(epsilon.removeprefix("eps="))}
    with native.use():
        x = native.put(recorded["x"])
        storage = ops.quantize_current(x, dtype=BY_NAME[name].dtype, columnwise=True, **flags)
    assert same(storage.rowwise_data, recorded["data"])
    assert same(storage.columnwise_data, recorded["transpose"])
    assert same(storage.rowwise_scale_inv, recorded["scale_inv"])


@pytest.mark.parametrize("recording", ["max4", "recent4"])
def test_histories_and_scales(recording: str, native: NativeBackend) -> None:
    algorithm = {"max4": "max", "recent4": "most_recent"}[recording]
    steps = [case for case in STATE.cases(f"{recording}/step") if f"{case}/x" in STATE]
    for direction, format_ in (("fwd", E4M3), ("bwd", E5M2)):
        first = STATE[f"{steps[0]}/meta/self/scaling_{direction}/amax_history"]
        history, scale = native.put(torch.zeros_like(first)), native.put(torch.ones(first.shape[1]))
        for step in steps:
            names = (f"{step}/x", f"{recording}/param/weight") if direction == "fwd" else (f"{step}/g",)
            after = STATE.case(f"{step}/meta/self/scaling_{direction}")
            with native.use():
                for slot, name in enumerate(names):
                    ops.amax(native.put(STATE[name]), out=history[0, slot])
                ops.update_delayed_scale(history, scale, fp8_max=format_.max, amax_compute_algo=algorithm)
            assert same(history, after["amax_history"]), step
            assert same(scale, after["scale"]), step


@pytest.mark.parametrize("case", FUNCTIONAL.cases("act/"))
def test_activations(case: str, native: NativeBackend) -> None:
    recorded, name = FUNCTIONAL.case(case), case.split("/")[1]
    # bf16: few values round to the other neighbour, 4e-3 away; fp32: the functions' own last bits.
    bound = 1e-4 if case.endswith("bfloat16") else 1e-6
    x, grad = native.put(recorded["x"]), native.put(recorded["gy"])
    with native.use():
        assert relative_error(ops.activation_fwd(x, activation=name).cpu(), recorded["y"]) <= bound
        assert relative_error(ops.activation_bwd(grad, x, activation=name).cpu(), recorded["gx"]) <= bound


@pytest.mark.parametrize("case", ["plain", "causal"])
def test_softmax(case: str, native: NativeBackend) -> None:
    recorded = FUNCTIONAL.case(f"softmax/{case}/bfloat16")
    x, grad = native.put(recorded["x"]), native.put(recorded["gy"])
    with native.use():
        output = ops.softmax_fwd(x, scale=0.125, causal="top_left" if case == "causal" else "none")
        grad_input = ops.softmax_bwd(grad, output, scale=0.125)
    # As with activations: few values round to the other neighbour.
    assert relative_error(output.cpu(), recorded["y"]) <= 1e-4
    assert relative_error(grad_input.cpu(), recorded["gx"]) <= 1e-4


def test_the_product_under_current_scaling(native: NativeBackend) -> None:
    recorded = FUNCTIONAL.case("gemm/current")
    with native.use():
        given = [native.put(recorded[name]) for name in ("x", "w")]
        x, w = (
            ops.quantize(t, ops.compute_scale(ops.amax(t), fp8_max=E4M3.max), dtype=E4M3.dtype, columnwise=True)
            for t in given
        )
        product = ops.gemm(x, w, out_dtype=torch.float32)
    # The recorded product was summed by tensor cores, which keep fewer bits along the sum than fp32 has.
    assert relative_error(product.cpu(), recorded["y"]) <= 3e-4


class Written(NamedTuple):
    """How a recorded kernel cast, as arguments of a fused op: the scale 0.7 under delayed scaling."""

    flags: dict[str, Any]

    @staticmethod
    def by(quantizer: str, target: ElementFormat, native: NativeBackend) -> Written:
        scaling = {"scale": torch.tensor([0.7]), "amax": torch.zeros(1)} if quantizer == "delayed" else {}
        own = {name: native.put(tensor) for name, tensor in scaling.items()}
        return Written({"dtype": target.dtype, "columnwise": True, **own})

    def assert_is(self, storage: QuantizedStorage, recorded: dict[str, torch.Tensor]) -> None:
        """The bytes but for few that are one code off, and the scale within a few units in the last place."""
        assert_nearly_same_codes(storage.rowwise_data, recorded["data"])
        assert_nearly_same_codes(storage.columnwise_data, recorded["transpose"])
        pairs = [(storage.rowwise_scale_inv, recorded["scale_inv"])]
        pairs += [(self.flags["amax"], recorded["amax"])] if "amax" in self.flags else []
        for found, wanted in pairs:
            np.testing.assert_array_max_ulp(found.cpu().numpy(), wanted.numpy(), maxulp=ULP)


@pytest.mark.parametrize("case", per_tensor("norm/"))
def test_a_norm_and_a_cast(case: str, native: NativeBackend) -> None:
    _, norm, _, zero_centered, quantizer = case.split("/")
    recorded, written = FUSED.case(case), Written.by(quantizer, E4M3, native)
    names = ("x", "weight", "bias") if norm == "layernorm" else ("x", "weight")
    fused: Callable[..., tuple[Any, ...]] = getattr(ops, f"{norm}_quantize")
    with native.use():
        given = [native.put(recorded[name]) for name in names]
        storage, *statistics = fused(*given, zero_centered_gamma=zero_centered == "zc=True", **written.flags)
    # The recorded ones are up to two units from the nearest number, ours up to one.
    np.testing.assert_array_max_ulp(statistics[-1].cpu().numpy(), recorded["rsigma"].numpy(), maxulp=ULP + 1)
    written.assert_is(storage, recorded)


@pytest.mark.parametrize("case", per_tensor("act/"))
def test_an_activation_and_a_cast(case: str, native: NativeBackend) -> None:
    _, activation, _, quantizer = case.split("/")
    recorded, written = FUSED.case(case), Written.by(quantizer, E4M3, native)
    with native.use():
        storage = ops.activation_quantize(native.put(recorded["x"]), activation=activation, **written.flags)
    written.assert_is(storage, recorded)


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_a_gradient_of_gelu_its_sums_and_a_cast(quantizer: str, native: NativeBackend) -> None:
    recorded, written = FUSED.case(f"dbias_dgelu/bfloat16/{quantizer}"), Written.by(quantizer, E5M2, native)
    with native.use():
        given = native.put(recorded["g"]), native.put(recorded["x"])
        storage, sums = ops.activation_bwd_quantize(*given, activation="gelu", bias_grad=True, **written.flags)
    written.assert_is(storage, recorded)
    # Sums in another order, rounded to bf16: some go to the other neighbour.
    assert relative_error(sums.cpu(), recorded["dbias"]) <= 1e-3


@pytest.mark.parametrize("quantizer", ["delayed", "current"])
def test_a_bias_gradient_and_a_cast(quantizer: str, native: NativeBackend) -> None:
    recorded, written = FUSED.case(f"bgrad_quantize/bfloat16/{quantizer}"), Written.by(quantizer, E5M2, native)
    with native.use():
        storage, sums = ops.bias_grad_quantize(native.put(recorded["g"]), **written.flags)
    assert same(storage.rowwise_data, recorded["data"])
    assert same(storage.columnwise_data, recorded["transpose"])
    assert same(storage.rowwise_scale_inv, recorded["scale_inv"])
    assert quantizer == "current" or same(written.flags["amax"], recorded["amax"])
    assert relative_error(sums.cpu(), recorded["dbias"]) <= 1e-3


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_three_steps_of_a_module(case: tuple[str, str, str], native: NativeBackend) -> None:
    name, dtype, recipe_name = case
    with native.use():
        found = run_module(*case, device=native.device)
    keys = compared(found)
    assert len(keys) >= 7
    for key in keys:
        if "meta" in key:
            assert state_agrees(name, key, found[key], found[f"ref/{key}"]), key
        else:
            assert distance(found[key], found[f"ref/{key}"]) <= bound_of(name, key, dtype, recipe_name), key
