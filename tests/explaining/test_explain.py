"""te_hal.explain: who runs an op or a module, composed of what, what every backend answers; nothing is launched."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from example_calls import ALL_CALLS, call_id
from stub_backends import refuse, stub

import te_hal
import te_hal.modules as te
from te_hal import recipe
from te_hal.dispatch import register_backend, resolve
from te_hal.explaining.kernel import kernel_name
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.errors import ArgumentError, ArgumentTypeError
from te_hal.schema.formats import E2M1
from te_hal.schema.support import Support


def no_launch(*_: Any, **__: Any) -> None:
    pytest.fail("a kernel was launched")


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=call_id)
def test_an_explained_op_is_run_by_the_kernel_that_dispatch_resolves(schema) -> None:
    found = te_hal.explain(schema.name)
    resolved = resolve(found.call)
    assert found.backend == resolved.backend.name
    assert found.kernel == kernel_name(resolved.kernel)
    assert (found.runs == "kernel") is (schema.name in resolved.backend.kernels)


def test_every_op_and_variant_can_be_explained_with_a_line_per_backend() -> None:
    names = {backend.name for backend in te_hal.list_backends()}
    for schema, variant in ALL_CALLS:
        found = te_hal.explain(schema.name, **({} if schema.variant is None else {schema.variant: variant}))
        assert {answer.backend for answer in found.answers} == names
        assert json.loads(json.dumps(found.as_dict()))["op"] == schema.name


def test_a_no_stands_with_the_sentence_of_its_backend() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    answer = next(each for each in te_hal.explain("amax").answers if each.backend == "picky")
    assert (answer.yes, answer.sentence, answer.code) == (False, "it is Sunday", "dtype")
    assert "picky: no, it is Sunday" in str(te_hal.explain("amax"))


def test_a_yes_says_which_way_a_gemm_goes() -> None:
    answered = Support(sentence="by the vendor's product")
    kernels = {"gemm": te_hal.get_backend().kernels["gemm"]}
    register_backend(stub("vendor", kernels=kernels, supports=lambda _: answered))
    with te_hal.use_backend("vendor"):
        found = te_hal.explain("gemm")
    assert found.how == "by the vendor's product"
    assert found.in_short() == "vendor, by the vendor's product"


def test_a_composed_op_names_its_parts_and_who_runs_them() -> None:
    found = te_hal.explain("activation_quantize", scale=torch.float32, amax=torch.float32)
    assert [(part.call.op, part.backend, part.runs) for part in found.parts] == [
        ("activation_fwd", "cpu_reference", "composition"),
        ("quantize", "cpu_reference", "kernel"),
    ]
    assert found.how == "because cpu_reference has no kernel for activation_quantize"


def test_a_fallback_is_called_one_and_leaves_no_trace() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    with te_hal.use_backend("picky"), te_hal.use_policy(te_hal.Policy(fallback=("cpu_reference",))):
        found = te_hal.explain("amax")
    assert (found.runs, found.backend) == ("fallback", "cpu_reference")
    assert te_hal.fallback_report() == {}


def test_nobody_runs_a_call_that_all_refuse() -> None:
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    with te_hal.use_backend("picky"):
        found = te_hal.explain("amax")
    assert (found.runs, found.kernel) == ("nobody", "")
    assert "picky it is Sunday" in found.how


def test_a_device_that_nobody_claims_is_explained_too() -> None:
    found = te_hal.explain("amax", device="meta")
    assert (found.backend, found.runs) == ("", "nobody")
    assert "none that claims it" in found.how


@pytest.mark.parametrize(
    ("op", "given", "names"),
    [
        ("gem", {}, "gemm"),
        ("gemm", {"c": "bf16"}, "out_dtype"),
        ("gemm", {"a": "int4"}, "e4m3"),
        ("gemm", {"a": "e2m1/mxfp8"}, r"e2m1\[/mode"),
        ("gemm", {"a": "e4m3/nvfp4"}, r"e2m1\[/mode"),
        ("gemm", {"layout": "sideways"}, "dgrad"),
        ("gemm", {"accumulate": True}, "needs `out`"),
        ("amax", {"input": torch.int32}, "bfloat16"),
        ("layernorm_fwd", {"epsilon": "1e-5"}, "left out"),
    ],
)
def test_what_is_no_call_is_refused_with_what_would_be(op, given, names) -> None:
    with pytest.raises(ArgumentError, match=names):
        te_hal.explain(op, **given)


def test_neither_a_number_nor_arguments_of_a_module_are_taken() -> None:
    with pytest.raises(ArgumentTypeError, match="an op's name"):
        te_hal.explain(3)  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match="device for a module"):
        te_hal.explain(torch.nn.ReLU(), device="cpu")  # type: ignore[call-overload]


@pytest.mark.parametrize("text", ["e4m3", "e4m3/mxfp8", "e5m2/block_1x128/rowwise+columnwise"])
def test_text_names_quantized_operands(text: str) -> None:
    kind = te_hal.explain("dequantize", input=text).call.kinds["input"]
    name, mode, copies = (*text.split("/"), *("tensor", "rowwise")[len(text.split("/")) - 1 :])[:3]
    assert repr(kind) == f"{name.upper()}/{mode}/{copies}"


def test_text_names_nvfp4_as_an_operand_and_as_a_casts_dtype() -> None:
    call = te_hal.explain("gemm", a="e2m1", b="e2m1/nvfp4_16x16/rowwise+columnwise").call
    assert [repr(call.kinds[name]) for name in "ab"] == [
        "E2M1/nvfp4/rowwise",
        "E2M1/nvfp4_16x16/rowwise+columnwise",
    ]
    found = te_hal.explain("quantize", dtype="e2m1", mode="nvfp4")
    assert (found.call.flags["dtype"], found.runs) == (E2M1.dtype, "kernel")


def test_a_module_is_explained_for_the_calls_it_has_seen() -> None:
    model = torch.nn.Sequential(te.Linear(32, 64), torch.nn.ReLU(), te.LayerNormLinear(64, 16))
    assert [module.plans for module in te_hal.explain(model).modules] == [(), ()]
    with te.autocast(recipe=recipe.DelayedScaling()):
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    linear, norm_linear = te_hal.explain(model).modules
    assert (linear.name, linear.type) == ("0", "Linear")
    gemms = [op.call.flags["layout"] for op in linear.plans[0].ops if op.call.op == "gemm"]
    assert gemms == ["fprop", "dgrad", "wgrad"]
    assert {op.call.op for op in norm_linear.plans[0].ops} >= {"layernorm_quantize", "gemm", "bias_grad_quantize"}
    assert linear.plans[0].copies["input"] == "E4M3/tensor: made rowwise, kept for the backward rowwise"
    assert "no forward yet" not in str(te_hal.explain(model))


def test_explaining_launches_nothing_and_keeps_the_modules_plans(monkeypatch) -> None:
    model, x = te.Linear(32, 64), torch.randn(16, 32)
    model(x)
    kept = list(model._plans)
    for backend in map(te_hal.dispatch.registry.tables().backends.get, ("cpu_reference", "null")):
        silent = replace(backend, kernels={op: _wrapped(kernel) for op, kernel in backend.kernels.items()})
        monkeypatch.setitem(te_hal.dispatch.registry.tables().backends, backend.name, silent)
    te_hal.explain(model)
    te_hal.explain("gemm")
    assert list(model._plans) == kept


def _wrapped(kernel):
    no_launch.__wrapped__ = kernel
    return no_launch


def test_a_module_is_explained_under_the_selection_in_force() -> None:
    model = te.Linear(32, 64)
    model(torch.randn(16, 32))
    with te_hal.use_backend("null"):
        assert {op.backend for op in te_hal.explain(model).modules[0].plans[0].ops} == {"null"}
    register_backend(stub("picky", supports=refuse("it is Sunday")))
    with te_hal.use_backend("picky"):
        plan = te_hal.explain(model).modules[0].plans[0]
    assert "picky: has no kernel for gemm" in plan.refusal
    assert plan.ops == ()


def test_attention_says_which_implementation_it_chose() -> None:
    attention = te.DotProductAttention(2, 16, attention_dropout=0.0)
    q = torch.randn(8, 1, 2, 16)
    attention(q, q, q)
    assert "torch's kernels" in te_hal.explain(attention).modules[0].plans[0].choice
