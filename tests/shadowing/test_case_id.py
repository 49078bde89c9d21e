"""The case that a real call belongs to has the same kinds, flags and sizes, and the kit runs it."""

import pytest
import torch
from command_line import CommandLine
from planted_fault import one_percent, plant

import te_hal
import te_hal.modules as te
from te_hal import ops, recipe
from te_hal.dispatch import use_observer
from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.validate import describe_call
from te_hal.shadowing import ShadowWarning
from te_hal.shadowing.case_id import case_id
from te_hal.shadowing.comparison import arguments_of
from te_hal.testing import Case, Status, Subject, Tested, run_case
from te_hal.testing.case import cases

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "mtfp8": recipe.MTFP8BlockScaling(),
}


def calls_of_a_training_step(chosen):
    """Op and arguments of every kernel that a small model runs."""
    seen = []

    def note(binding):
        def run(*args, **kwargs):
            schema = SCHEMAS[binding.call.op]
            seen.append((binding.call.op, arguments_of(schema, args, kwargs)))
            return binding.kernel(*args, **kwargs)

        return run

    net = torch.nn.Sequential(te.Linear(32, 64), te.LayerNormMLP(64, 96, activation="swiglu")).bfloat16()
    with use_observer(note):
        for _ in range(2):
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                y = net(torch.randn(4, 16, 32).bfloat16())
            y.float().sum().backward()
    return seen


@pytest.mark.parametrize("name", RECIPES)
def test_every_call_of_a_training_belongs_to_a_case_of_the_same_kind_and_size(name) -> None:
    calls = calls_of_a_training_step(RECIPES[name])
    assert len({op for op, _ in calls}) > 5
    for op, arguments in calls:
        case = Case.of(case_id(op, arguments))
        mine, theirs = (describe_call(SCHEMAS[op], each) for each in (arguments, case.arguments()))
        assert (case.op, str(mine)) == (op, str(theirs))
        for operand in SCHEMAS[op].operands:
            value = arguments[operand.name]
            if isinstance(value, torch.Tensor) and operand.shape != "1":
                assert value.shape == case.arguments()[operand.name].shape


@pytest.mark.parametrize("op", SCHEMAS)
def test_a_case_is_found_again_from_its_arguments(op) -> None:
    """Those whose flags are numbers per group are named by the first, and the others keep the kit's."""
    for case in cases(op, quick=True)[:12]:
        found = case_id(op, case.arguments())
        plain = {axis: word for axis, word in case.words.items() if axis not in ("values", "memory", "run")}
        assert {axis: Case.of(found).words[axis] for axis in plain} == plain


def test_a_dtype_that_the_kit_does_not_try_has_no_case() -> None:
    assert case_id("amax", {"input": torch.ones(4, dtype=torch.float64), "out": None}) == ""


@pytest.mark.parametrize("backend", ["cpu_reference", "musa_emulator"])
@pytest.mark.parametrize("mode", ["mtfp8_1x128", "block_1x128"])
def test_a_copy_that_is_tried_by_its_id_alone_runs(mode, backend) -> None:
    copies = "column-same-order" if mode.startswith("mtfp8") else "column"
    case = Case.of(f"gemm:a=e5m2.{mode}.{copies},b=e4m3.{mode}.{copies},layout=wgrad,out_dtype=bf16")
    assert run_case(Subject(backend).prepare(), case).status is Status.PASSED


NO_CASES = {
    "too few sizes": "gemm:shape=8x8",
    "too many sizes": "gemm:shape=2x8x8x8",
    "no sizes": "gemm:shape=axb",
    "no number": "layernorm_fwd:epsilon=small",
    "no storage": "gemm:a=e4m3.tensor.diagonal,b=e4m3.tensor.row",
    "none where a number is due": "layernorm_fwd:epsilon=none",
}


@pytest.mark.parametrize("case", NO_CASES)
def test_what_is_no_shape_and_no_number_is_still_no_case(case) -> None:
    with pytest.raises(te_hal.schema.errors.ArgumentError, match="copy a whole id"):
        Case.of(NO_CASES[case])


def test_the_kit_names_the_fault_that_a_shadow_found(tmp_path) -> None:
    backend = plant("gemm", one_percent)
    with te_hal.shadow(backend, folder=tmp_path) as shadow, pytest.warns(ShadowWarning, match="case gemm:"):
        ops.gemm(torch.randn(24, 56), torch.randn(40, 56))
    assert shadow.difference.case == "gemm:shape=24x56x40,a=fp32,b=fp32"
    tested = Subject(backend).prepare()
    assert isinstance(tested, Tested)
    assert run_case(tested, Case.of(shadow.difference.case)).status is Status.FAILED


def test_the_command_takes_the_id(tmp_path) -> None:
    case = "gemm:shape=24x56x40,a=fp32,b=fp32"
    done = CommandLine(tmp_path).call("conformance", "--backend", "cpu_reference", "-j", "0", "--case", case)
    assert done.exit_code == 0, done.output
