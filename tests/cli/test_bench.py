"""`te-hal bench`: rates of real calls beside measured ceilings; what cannot be measured is refused before measuring."""

import json

import pytest
from faulty_backends import faulty
from stub_backends import stub

import te_hal
from te_hal.cli import bench_run, bench_shapes
from te_hal.cli.bench_shapes import Model
from te_hal.dispatch import register_backend

#: Every shape divides by 128, and nothing takes time.
TINY = Model(hidden=128, ffn=256, heads=2, kv_heads=1)
OPTIONS = ("--tokens", "128", "--seconds", "0.001")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(bench_shapes.MODELS, "1B", TINY)
    monkeypatch.setattr(bench_run, "_COPY", {True: 2**16, False: 2**16})
    monkeypatch.setattr(bench_run, "_SIDE", {True: 64, False: 64})
    monkeypatch.setattr(
        "te_hal.cli.bench.size_for",
        lambda _, models, tokens, *, quick: bench_shapes.Size(models or ("1B",), tokens or 128, (128, 256), quick),
    )


def refuse_constant(constant):
    message = f"{constant} is not JSON"
    raise ValueError(message)


def record_of(path):
    """Strict JSON only."""
    return json.loads(path.read_text(), parse_constant=refuse_constant)


@pytest.mark.parametrize("backend", ["cpu_reference", "musa_emulator", "null"])
def test_every_family_is_timed_and_the_record_has_what_is_printed(backend, command_line, tmp_path) -> None:
    done = command_line.call("bench", "--backend", backend, "--quick", *OPTIONS, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    found = record_of(tmp_path / "a.json")
    assert (found["backend"], found["size"]["tokens"], found["timed_by"]) == (backend, 128, "clock")
    assert {row["op"] for row in found["rows"]} >= {
        *("amax", "quantize", "dequantize", "quantize_current", "rmsnorm_fwd", "layernorm_bwd", "rmsnorm_quantize"),
        *("activation_fwd", "activation_bwd", "softmax_fwd", "softmax_bwd", "bias_grad", "gemm"),
    }
    assert len({row["id"] for row in found["rows"]}) == len(found["rows"])
    for row in found["rows"]:
        assert row["op"] in done.stdout
        assert "failed" not in row
        assert "refused" in row or 0 < row["least_us"] <= row["us"]
    assert f"copy {found['ceilings']['copy_gb_per_s']:.4g} GB/s" in done.stdout


def test_rates_are_bytes_and_operations_over_time_and_shares_are_of_the_ceilings(command_line, tmp_path) -> None:
    path = tmp_path / "a.json"
    command_line.call("bench", "--op", "amax|gemm|dequantize", "--quick", *OPTIONS, "--json", str(path))
    found = record_of(path)
    rows = {row["id"]: row for row in found["rows"]}
    moved = {
        "amax:bf16:128x128": 2 * 128 * 128 + 4,
        "dequantize:per tensor:128x128": (1 + 2) * 128 * 128 + 4,
        "dequantize:mxfp8:128x128": (1 + 2) * 128 * 128 + 128 * 4,
    }
    for name, count in moved.items():
        rate = count / rows[name]["us"] / 1e3
        assert rows[name]["gb_per_s"] == pytest.approx(rate)
        assert rows[name]["of_ceiling"] == pytest.approx(rate / found["ceilings"]["copy_gb_per_s"])
    product = rows["gemm:per tensor, wgrad:128x128x128"]
    assert product["tflop_per_s"] == pytest.approx(2 * 128**3 / product["us"] / 1e6)
    assert product["of_ceiling"] == pytest.approx(product["tflop_per_s"] / found["ceilings"]["gemm_tflop_per_s"])
    assert [row["width"] for row in found["fp8"]["rows"]] == [128, 256]
    assert set(found["fp8"]["pays_from"]) == {"per tensor", "blocks", "mxfp8"}


def test_without_products_nothing_is_said_of_fp8(command_line, tmp_path) -> None:
    done = command_line.call("bench", "--op", "amax", *OPTIONS, "--json", str(tmp_path / "a.json"))
    assert record_of(tmp_path / "a.json")["fp8"] is None
    assert "pays" not in done.stdout


def test_what_a_backend_refuses_is_a_row_and_no_failure(command_line, tmp_path) -> None:
    register_backend(stub("only_amax"))
    done = command_line.call(
        "bench", "--backend", "only_amax", "--op", "amax|softmax_fwd", *OPTIONS, "--json", str(tmp_path / "a.json")
    )
    assert done.exit_code == 0, done.output
    amax, softmax = record_of(tmp_path / "a.json")["rows"]
    assert amax["runs"] == "kernel"
    assert "has no kernel for softmax_fwd" in softmax["refused"]
    assert "refused: softmax_fwd on backend only_amax" in done.stdout


def test_a_backend_without_products_has_a_record_that_says_so(command_line, tmp_path) -> None:
    register_backend(stub("only_amax"))
    path = tmp_path / "a.json"
    done = command_line.call("bench", "--backend", "only_amax", "--quick", *OPTIONS, "--json", str(path))
    assert done.exit_code == 0, done.output
    found = record_of(path)
    assert not any("runs" in row for row in found["rows"] if "refused" in row)
    for row in found["fp8"]["rows"]:
        assert (row["bf16_us"], row["scaled_us"], row["failed"]) == (None, {}, {})
        assert "has no kernel for gemm" in row["refused"]["bf16"]
    assert "nothing to hold FP8 against" in done.stdout
    assert command_line.call("bench", "--from", str(path)).stdout == done.stdout


def test_a_product_that_fails_at_one_width_leaves_the_others_and_ends_with_code_1(command_line, tmp_path) -> None:
    def change(right):
        def gemm(a, b, **settings):
            if 256 in a.shape and settings["layout"] == "wgrad":
                raise RuntimeError("the device has caught fire")
            return right(a, b, **settings)

        return gemm

    register_backend(fire := faulty("gemm", change))
    path = tmp_path / "a.json"
    done = command_line.call("bench", "--backend", fire.name, "--quick", *OPTIONS, "--json", str(path))
    assert done.exit_code == 1
    narrow, wide = record_of(path)["fp8"]["rows"]
    assert narrow["bf16_us"] > 0
    assert narrow["failed"] == {}
    assert wide["bf16_us"] is None
    assert wide["failed"]["mxfp8"] == "RuntimeError: the device has caught fire"
    assert "FAILED" in done.stdout.split("beside bf16:")[1]


def test_a_kernel_that_fails_is_a_row_with_its_error_and_exit_code_1(command_line, tmp_path) -> None:
    def act(_):
        raise RuntimeError("the device has caught fire")

    register_backend(stub("fire", act=act))
    done = command_line.call("bench", "--backend", "fire", "--op", "amax", *OPTIONS, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 1
    assert record_of(tmp_path / "a.json")["rows"][0]["failed"] == "RuntimeError: the device has caught fire"
    assert "FAILED: RuntimeError" in done.stdout


def test_a_composed_op_and_a_fallback_are_called_so(command_line) -> None:
    register_backend(stub("only_amax"))
    with te_hal.use_policy(te_hal.Policy(fallback=("cpu_reference",))), pytest.warns(te_hal.dispatch.FallbackWarning):
        done = command_line.call("bench", "--backend", "only_amax", "--op", "bias_grad|softmax_fwd", *OPTIONS)
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines["bias_grad"].endswith("composition")
    assert lines["softmax_fwd"].endswith("fallback")


BAD = {
    "an op that is none": (("--op", "gemmm"), "accepted: amax, quantize"),
    "no regular expression": (("--op", "("), "a regular expression"),
    "a model that is none": (("--model", "13B"), "got '13B'; accepted: 1B, 7B, 70B"),
    "a backend that is none": (("--backend", "muse"), "got backend 'muse'"),
    "a device that is none": (("--device", "abacus"), "--device"),
    "a device that is not served": (("--backend", "musa_emulator", "--device", "meta"), "tensors on meta"),
    "no tokens": (("--tokens", "0"), "--tokens"),
    "no time": (("--seconds", "0"), "--seconds"),
    "a threshold below zero": (("--threshold", "-1"), "--threshold"),
    "a folder that is missing": (("--json", "/no/such/folder/a.json"), "make the folder"),
    "a folder for a file": (("--json", "/"), "a file in a folder"),
    "a record that is missing": (("--against", "/no/such/file"), "a file that cannot be read"),
    "a threshold for nothing": (("--threshold", "0.2"), "got 0.2 alone; accepted: --against beside it"),
    "a time and a record": (("--from", "x.json", "--seconds", "0.1"), "got --seconds; accepted: --against"),
    "measuring and a record": (
        ("--from", "x.json", "--quick", "--op", "gemm"),
        "got --quick, --op; accepted: --against",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_ends_with_code_2_before_anything_is_measured(case, command_line, monkeypatch) -> None:
    monkeypatch.setattr("te_hal.cli.bench.run_bench", lambda *_: pytest.fail("measured"))
    arguments, said = BAD[case]
    done = command_line.call("bench", *arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
