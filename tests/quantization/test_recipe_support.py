"""A recipe that the backend lacks is refused with the backend's sentence, before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from stub_backends import stub

import te_hal
import te_hal.modules as te
from te_hal.dispatch import GemmCopies, register_backend
from te_hal.quantization.recipe_support import recipe_support
from te_hal.recipe import DelayedScaling, Float8CurrentScaling, Format
from te_hal.schema.errors import UnsupportedError
from te_hal.schema.formats import E5M2, ColumnwiseOrder
from te_hal.schema.storage import StorageKind
from te_hal.schema.support import SUPPORTED, Call, Code, Support

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
SENTENCE = "the toy chip lacks that"


def kernels() -> dict[str, Callable[..., object]]:
    with te_hal.use_backend("cpu_reference"):
        return dict(te_hal.get_backend().kernels)


def lacking(reason: Callable[[Call], bool]) -> Callable[[Call], Support]:
    return lambda call: Support.no(Code.FORMAT, SENTENCE) if reason(call) else SUPPORTED


def has_e5m2(call: Call) -> bool:
    return call.flags.get("dtype") == E5M2.dtype or any(
        isinstance(kind, StorageKind) and kind.format == E5M2 for kind in call.kinds.values()
    )


LACKS = {
    "quantize": lambda call: call.op == "quantize",
    "E5M2": has_e5m2,
    "gemm of one layout": lambda call: call.op == "gemm" and call.flags["layout"] == "wgrad",
    "mixed formats": lambda call: call.op == "gemm" and call.kinds["a"] != call.kinds["b"],
    "amax with the cast": lambda call: call.op == "quantize" and call.kinds["amax"] is not None,
    "the update": lambda call: call.op == "update_delayed_scale",
    "the largest of the window": lambda call: call.flags.get("amax_compute_algo") == "max",
}


@pytest.mark.parametrize("case", LACKS)
def test_a_forced_backend_that_lacks_the_recipe_is_refused_on_entry_with_its_sentence(case):
    register_backend(stub("toy", kernels=kernels(), supports=lacking(LACKS[case])))
    module = te.Linear(32, 32)
    with te_hal.use_backend("toy"), te.autocast(enabled=False):
        autocast = te.autocast(recipe=DelayedScaling())
        with pytest.raises(NotImplementedError, match=SENTENCE) as raised:
            autocast.__enter__()
        assert isinstance(raised.value, UnsupportedError)
        assert "DelayedScaling" in raised.value.where
        assert "'toy'" in raised.value.where
        assert not te.FP8GlobalStateManager.is_fp8_enabled()
    assert not module.fp8_initialized
    with te.autocast(recipe=DelayedScaling()):
        module(torch.ones(16, 32))


def test_calibrating_needs_no_fp8_kernels():
    register_backend(
        stub("toy", kernels=kernels(), supports=lacking(lambda call: call.op == "quantize" or has_e5m2(call)))
    )
    module = te.Linear(32, 32)
    with te_hal.use_backend("toy"), te.autocast(enabled=False, calibrating=True):
        module(torch.full((16, 32), -2.0))
    assert module.fp8_meta["scaling_fwd"].amax_history[0, 0].item() == 2.0


def test_a_backend_for_inference_is_taken_where_gradients_are_off():
    register_backend(
        stub(
            "toy", kernels=kernels(), supports=lacking(lambda call: has_e5m2(call) or call.op == "update_delayed_scale")
        )
    )
    module, x = te.Linear(32, 32), torch.ones(16, 32)
    with te_hal.use_backend("toy"), torch.no_grad(), te.autocast(recipe=DelayedScaling()):
        assert module(x).shape == (16, 32)
    with (
        te_hal.use_backend("toy"),
        pytest.raises(UnsupportedError, match=SENTENCE),
        te.autocast(recipe=DelayedScaling()),
    ):
        pass


def test_a_recipe_that_needs_less_is_taken():
    register_backend(stub("toy", kernels=kernels(), supports=lacking(has_e5m2)))
    register_backend(stub("no_update", kernels=kernels(), supports=lacking(LACKS["the update"])))
    module = te.Linear(32, 32)
    with te_hal.use_backend("toy"), te.autocast(recipe=DelayedScaling(fp8_format=Format.E4M3)):
        module(torch.ones(16, 32)).sum().backward()
    with te_hal.use_backend("no_update"), te.autocast(recipe=Float8CurrentScaling()):
        pass
    own_update = DelayedScaling(amax_compute_algo=lambda history: history.amax(0))
    with te_hal.use_backend("no_update"), te.autocast(recipe=own_update):
        pass


@pytest.mark.parametrize("op", ["quantize", "gemm", "amax", "compute_scale"])
def test_a_backend_without_the_kernel_is_refused_although_it_says_yes(op):
    register_backend(stub("toy", kernels={name: kernel for name, kernel in kernels().items() if name != op}))
    with (
        te_hal.use_backend("toy"),
        pytest.raises(UnsupportedError, match=f"has no kernel for {op}"),
        te.autocast(recipe=Float8CurrentScaling()),
    ):
        pass


def test_a_fallback_of_the_policy_counts():
    register_backend(stub("toy", kernels=kernels(), supports=lacking(LACKS["quantize"])))
    with te_hal.use_backend("toy"), te_hal.use_policy(te_hal.Policy(fallback=("cpu_reference",))):
        with te.autocast(recipe=Float8CurrentScaling()):
            pass
        assert te_hal.fallback_report() == {}


def test_an_op_that_the_policy_sends_elsewhere_counts():
    register_backend(stub("toy", kernels=kernels(), supports=lacking(LACKS["gemm of one layout"])))
    with (
        te_hal.use_backend("toy"),
        te_hal.use_policy(te_hal.Policy(per_op={"gemm": "cpu_reference"})),
        te.autocast(recipe=Float8CurrentScaling()),
    ):
        pass
    with (
        te_hal.use_backend("cpu_reference"),
        te_hal.use_policy(te_hal.Policy(per_op={"gemm": "toy"})),
        pytest.raises(UnsupportedError, match=SENTENCE),
        te.autocast(recipe=Float8CurrentScaling()),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_backend_with_one_activation_dtype_is_taken(dtype):
    def other_dtype(call: Call) -> bool:
        return call.op in ("quantize", "amax") and call.kinds["input"] != dtype

    register_backend(stub("toy", kernels=kernels(), supports=lacking(other_dtype)))
    with te_hal.use_backend("toy"), te.autocast(recipe=Float8CurrentScaling()):
        te.Linear(32, 32, params_dtype=dtype)(torch.ones(16, 32, dtype=dtype))
        for refused in {torch.float32, torch.float16, torch.bfloat16} - {dtype}:
            with pytest.raises(UnsupportedError, match=SENTENCE):
                te.Linear(32, 32, params_dtype=refused)(torch.ones(16, 32, dtype=refused))


def test_the_questions_are_those_that_a_linear_layer_asks():
    """Copies and order as the backend's gemm reads them."""
    asked: list[Call] = []

    def note(call: Call) -> Support:
        asked.append(call)
        return SUPPORTED

    reads = {"fprop": ("rowwise", "rowwise"), "dgrad": ("rowwise", "columnwise"), "wgrad": ("columnwise", "columnwise")}
    backend = stub(
        "toy",
        kernels=kernels(),
        supports=note,
        gemm_copies=lambda layout, *_: GemmCopies(*reads[layout]),
        columnwise_order=ColumnwiseOrder.TRANSPOSED,
    )
    register_backend(backend)
    recipe = DelayedScaling()
    assert recipe_support(recipe, backend, CPU)
    foreseen = [call for call in asked if call.op in ("quantize", "gemm")]
    asked.clear()
    with te_hal.use_backend("toy"):
        module = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16)
        with te.autocast(recipe=recipe):
            asked.clear()
            y = module(torch.ones(16, 32, dtype=torch.bfloat16, requires_grad=True))
        y.sum().backward()
    run = [call for call in asked if call.op in ("quantize", "gemm")]
    assert run
    assert [call for call in run if call not in foreseen] == []


def test_without_a_forced_backend_the_modules_first_op_refuses_and_state_stays():
    register_backend(
        stub("toy", kernels=kernels(), supports=lacking(has_e5m2), default_for=("meta",), serves=("meta",))
    )
    module = te.Linear(32, 32, device="meta")
    x = torch.empty(16, 32, device="meta", requires_grad=True)
    with te.autocast(recipe=DelayedScaling()):
        with pytest.raises(UnsupportedError, match=SENTENCE):
            module(x)
        assert not module.fp8_initialized
        assert module.fp8_meta["recipe"] is None
        assert not module.fp8
    assert module.state_dict()["_extra_state"].numel() == 0


def test_a_refused_recipe_leaves_the_state_of_the_one_before():
    register_backend(stub("toy", kernels=kernels(), supports=lacking(has_e5m2)))
    module, x = te.Linear(32, 32), torch.full((16, 32), 2.0)
    before = DelayedScaling(fp8_format=Format.E4M3, amax_history_len=4)
    with te.autocast(recipe=before):
        module(x, is_first_microbatch=True).sum().backward()
    saved = module.state_dict()["_extra_state"]
    with te_hal.use_policy(te_hal.Policy(per_op={"gemm": "toy"})), te.autocast(recipe=DelayedScaling()):
        with pytest.raises(UnsupportedError, match=SENTENCE):
            module(x)
        assert module.fp8_meta["recipe"] == before
    assert torch.equal(module.state_dict()["_extra_state"], saved)


def test_in_tree_backends_have_both_recipes():
    for name in ("cpu_reference", "null"):
        with te_hal.use_backend(name):
            for recipe in (DelayedScaling(), Float8CurrentScaling()):
                assert recipe_support(recipe, te_hal.get_backend(), CPU)


def test_a_backend_that_is_not_usable_has_no_recipe_and_is_asked_nothing_else():
    def never(_: Call) -> Support:
        raise AssertionError("asked")

    backend = stub("toy", supports=never, usable=lambda: Support.no(Code.ENVIRONMENT, "no library"))
    register_backend(backend)
    assert recipe_support(DelayedScaling(), backend, CPU).sentence == "no library"


def test_what_a_backend_declares_does_not_depend_on_the_machine():
    backend = stub("toy", kernels=kernels(), usable=lambda: Support.no(Code.ENVIRONMENT, "no library"))
    assert recipe_support(DelayedScaling(), backend, CPU, declared=True)


def test_a_changed_recipe_is_asked_about_again():
    register_backend(stub("toy", kernels=kernels(), supports=lacking(has_e5m2)))
    recipe = DelayedScaling(fp8_format=Format.E4M3)
    with te_hal.use_backend("toy"):
        for _ in range(2):
            with te.autocast(recipe=recipe):
                pass
        recipe.fp8_format = Format.HYBRID
        with pytest.raises(UnsupportedError, match=SENTENCE), te.autocast(recipe=recipe):
            pass
