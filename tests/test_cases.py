"""Known traps: small inputs on which systems of this kind failed, each with the test that holds the right value.

Numbers are those of the project's list of public reports. The literal input of a report stands here where no other
test uses it; what needs a module or recipe of a later issue names that issue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from named_tests import missing

import te_hal.modules as te
import te_hal.ops
from te_hal import recipe

TRANSFORMER = (
    "Transformer modules and the GPT main job: BF16 against FP8 on real text, "
    "with everything a user looks at before trusting FP8"
)
WHOLE_SET = "The whole module set: attention in every form, MoE, fusible ops, recompute, generation"


@dataclass(frozen=True)
class Case:
    """A trap: what it is about, the tests that hold it, and its parts that wait for an issue."""

    about: str
    tests: tuple[str, ...]
    later: dict[str, str] = field(default_factory=dict)


CAST, AMAX = "backends/cpu_reference/test_cast.py", "backends/cpu_reference/test_amax.py"
MXFP8 = "backends/cpu_reference/test_mxfp8_cast.py"
ATTENTION = "modules/test_attention"
GROUPED = "modules/test_grouped_linear.py"
FP8, AUTOCAST, STATE = "modules/test_linear_fp8.py", "quantization/test_autocast.py", "modules/test_state_dict.py"

CASES = {
    "B01": Case(
        "E4M3 overflow: NaN or 448",
        ("test_cases.py::test_overflow_saturates_and_nan_stays_nan", f"{CAST}::test_overflow_saturates_and_nan_stays"),
    ),
    "B02": Case(
        "codes that do not survive decode and encode",
        (
            f"{CAST}::test_finite_codes_survive_decoding_and_encoding",
            f"{CAST}::test_neighbours_of_every_tie_agree_with_ml_dtypes",
            "backends/cpu_reference/test_nvfp4_cast.py::test_codes_survive_decoding_and_encoding",
            "backends/cpu_reference/test_nvfp4_rounding.py::test_the_nearest_code_is_that_of_ml_dtypes",
        ),
    ),
    "B04": Case(
        "a zero row becomes NaN",
        (
            "test_cases.py::test_zero_inputs_rows_and_weights_stay_zero_and_finite",
            f"{FP8}::test_zeros_stay_zero_and_everything_stays_finite",
            f"{CAST}::test_a_zero_row_stays_zero",
            "backends/cpu_reference/test_block_cast.py::test_blocks_of_zeros_stay_zeros",
            "modules/test_block_recipes.py::test_zeros_stay_zero_and_everything_stays_finite",
            "modules/test_nvfp4.py::test_zeros_give_finite_values",
            "backends/cpu_reference/test_nvfp4_cast.py::test_what_hard_blocks_decode_to",
        ),
    ),
    "B07": Case(
        "compute_scale at zero, NaN, infinity and below epsilon",
        ("test_cases.py::test_scales_at_the_edges", f"{AMAX}::test_scale_of_the_written_vectors"),
    ),
    "B10": Case("E8M0 rounding direction", (f"{MXFP8}::test_a_scale_is_rounded_up_so_that_nothing_saturates",)),
    "B11": Case("957 becomes 896", (f"{MXFP8}::test_957_beside_960_becomes_960",)),
    "B13": Case("padded scale bytes reach the product", (f"{MXFP8}::test_padding_of_scales_reaches_no_product",)),
    "B17": Case(
        "RMSNorm cast order",
        (
            "modules/test_normalization.py::test_rmsnorm_casts_once_at_the_end",
            "backends/cpu_reference/test_norm.py::test_hugging_faces_order_of_casts_is_another_one",
        ),
    ),
    "B19": Case(
        "the backward of a reference gemm: bias added again, gelu's input ignored, three dimensions lost",
        (
            "ops/test_backward_of_linear.py::test_the_gradients_of_gelu_of_a_linear_layer_are_those_of_autograd",
            "ops/test_backward_of_linear.py::test_a_product_of_the_backward_takes_no_bias",
            "ops/test_backward_of_linear.py::test_three_dimensions_are_refused_and_never_flattened",
            "ops/test_backward_of_linear.py::test_a_layer_keeps_leading_dimensions_in_its_output_and_gradient",
        ),
    ),
    "B20": Case(
        "a bias of another dtype than the output",
        (
            "test_cases.py::test_a_bf16_bias_is_added_to_an_fp32_result_exactly",
            "backends/cpu_reference/test_gemm.py::test_a_bias_of_any_dtype_is_added_exactly",
        ),
    ),
    "B23": Case(
        "scales of gradients under a checkpoint",
        ("modules/test_recompute.py::test_scales_of_gradients_move_as_without_checkpoint",),
    ),
    "B25": Case(
        "a weight cache first filled without gradients",
        (
            "modules/test_weight_cache.py::test_results_equal_those_without_the_argument",
            "modules/test_recompute.py::test_weights_kept_for_microbatches_are_those_of_the_first_run",
        ),
    ),
    "B28": Case(
        "nesting, switching off and on, exceptions",
        (
            f"{AUTOCAST}::test_off_inside_on_is_exactly_high_precision",
            f"{AUTOCAST}::test_the_same_module_switches_back_and_forth",
            f"{AUTOCAST}::test_an_exception_leaves_what_was_in_force_before",
            f"{FP8}::test_only_the_recipe_in_force_decides_whether_a_step_is_quantized",
        ),
    ),
    "B31": Case(
        "calibration takes max instead of max-abs",
        (
            "test_cases.py::test_calibration_records_the_largest_magnitude_of_negative_inputs",
            "quantization/test_calibration.py::test_calibrating_records_the_largest_magnitude",
        ),
    ),
    "B33": Case(
        "a changed recipe that goes unnoticed",
        (
            "quantization/test_scaling_state.py::test_changing_the_recipe_object_counts_from_the_next_forward",
            "modules/test_block_recipes.py::test_a_changed_recipe_takes_effect_at_the_next_step_and_drops_cached_weights",
            "modules/test_block_recipes.py::test_the_same_object_changed_in_place_is_noticed",
            "modules/test_backward_override.py::test_the_same_object_with_another_override_is_noticed",
            "quantization/test_custom_recipe_changes.py::test_another_factory_on_the_same_object_is_noticed",
            "quantization/test_custom_recipe_changes.py::test_a_factory_that_changes_inside_is_asked_again",
        ),
    ),
    "B36": Case(
        "a checkpoint copied into FP8 weights leaves a stale amax",
        ("modules/test_quantized_weights.py::test_loaded_weights_are_quantized_by_their_own_amax",),
    ),
    "B39": Case(
        "extra state missing in foreign weights",
        (
            f"{STATE}::test_weights_of_the_torch_module_load_strictly",
            f"{STATE}::test_the_other_way_round_dropping_the_extra_keys_is_enough",
            "modules/test_transformer.py::test_weights_without_extra_state_load_strictly",
            "modules/test_attention_multihead.py::test_a_state_without_extra_state_loads_strictly",
        ),
    ),
    "B41": Case(
        "extra state that is no tensor",
        (
            f"{STATE}::test_extra_state_is_a_cpu_uint8_tensor_that_safe_formats_carry",
            "quantization/test_extra_state.py::test_state_goes_through_a_file_without_pickle",
            "modules/test_saving.py::test_saving_what_was_loaded_gives_the_same_bytes_and_goes_on_exactly",
            "modules/test_transformer.py::test_every_extra_state_is_a_cpu_uint8_tensor_that_loads_without_pickle",
        ),
    ),
    "B44": Case(
        "a resumed run that differs",
        (
            f"{STATE}::test_ten_steps_equal_five_and_five_more_in_a_new_process",
            "modules/test_saving.py::test_saving_what_was_loaded_gives_the_same_bytes_and_goes_on_exactly",
            "optimizers/test_optimizer_state.py::test_training_goes_on_from_a_file_bit_for_bit",
            "modules/test_transformer.py::test_training_with_dropout_goes_on_from_a_file_bit_for_bit",
        ),
    ),
    "B46": Case(
        "quantized tensors in pickles and copies",
        (
            "modules/test_quantized_weights.py::test_a_saved_model_resumes_bit_for_bit",
            "modules/test_quantized_weights.py::test_a_deep_copy_trains_apart",
            "quantization/test_float8_pickling.py::test_a_copy_has_the_same_bytes_and_shares_none",
            "quantization/test_block_tensors.py::test_a_copy_has_the_same_bytes_and_shares_none",
            "quantization/test_nvfp4_tensors.py::test_copies_and_pickles_hold_the_same_bytes_and_share_nothing",
            "quantization/test_hybrid_quantizer.py::test_a_copy_has_the_same_parts_and_shares_none",
            "quantization/test_distributed_checkpoint.py::test_a_tensor_comes_back_with_the_same_bytes",
            "quantization/test_distributed_checkpoint.py::test_staging_that_goes_by_addresses_is_refused_by_name",
        ),
    ),
    "B47": Case(
        "another dtype for FP8 weights",
        (
            "modules/test_quantized_weights.py::test_another_nominal_dtype_leaves_weights_quantized_and_their_values",
            "quantization/test_nvfp4_tensors.py::test_another_nominal_dtype_or_device_keeps_the_codes",
        ),
    ),
    "B49": Case(
        "master weights started from dequantized ones",
        (
            "modules/test_quantized_weights.py::test_the_initial_value_is_preserved_exactly_until_it_is_cleared",
            "modules/test_quantized_weights.py::test_a_master_may_start_from_the_preserved_value",
            f"{GROUPED}::test_weights_that_live_in_fp8_give_the_first_step_of_weights_quantized_at_each_step",
        ),
    ),
    "B50": Case(
        "main_grad that gets one microbatch only",
        (
            "modules/test_main_grad.py::test_true_overwrites_and_everything_else_adds",
            "modules/test_main_grad.py::test_a_layer_used_twice_overwrites_once_and_adds_the_second_use",
            "modules/test_main_grad.py::test_microbatches_that_share_one_backward_lose_none_of_their_gradients",
            "quantization/test_golden_state.py::test_microbatches_cache_the_weight_and_accumulate_as_recorded",
        ),
    ),
    "B52": Case(
        "delayed weight gradients overwrite what is there",
        ("modules/test_delayed_wgrad.py::test_two_rounds_add_up_to_the_gradients_of_two_backwards",),
    ),
    "B54": Case(
        "fused cross entropy that writes its gradients wrongly",
        (
            "modules/test_cross_entropy.py::test_losses_and_gradients_are_torchs_in_float64_and_logits_stay_as_they_are",
            "modules/test_cross_entropy.py::test_an_ignored_row_gives_exactly_zero_whatever_its_logits",
            "modules/test_cross_entropy.py::test_recorded_losses_and_gradients_are_reproduced",
        ),
    ),
    "B56": Case(
        "variants of Adam that are missing or wrong",
        (
            "optimizers/test_fused_adam.py::test_five_steps_are_those_of_torch_in_float64",
            "optimizers/test_fused_adam.py::test_every_element_follows_the_formula",
            "optimizers/test_fused_adam.py::test_masters_are_bit_equal_to_parameters_of_fp32",
            "optimizers/test_fused_adam.py::test_a_bf16_parameter_and_its_remainder_are_the_master",
            "optimizers/test_fused_adam.py::test_a_grad_scaler_unscales_and_an_infinite_gradient_changes_nothing",
            "optimizers/test_fused_adam.py::test_a_bad_argument_is_refused_by_name",
        ),
    ),
    "B59": Case(
        "tensors with a columnwise copy alone",
        (
            "quantization/test_block_tensors.py::test_a_columnwise_only_tensor_has_the_shape_of_what_it_stands_for",
            "test_cases.py::test_a_columnwise_only_tensor_of_one_scale_has_its_shape_and_no_rowwise_buffer",
            "backends/cpu_reference/test_nvfp4_cast.py::test_a_columnwise_copy_alone_decodes_to_the_input_also_after_the_transform",
        ),
    ),
    "B61": Case(
        "dimension errors that mislead",
        (
            "modules/test_shape_rule.py::test_a_size_that_fp8_cannot_take_is_refused_with_the_way_out",
            "modules/test_shape_rule.py::test_the_product_of_leading_sizes_counts",
            "test_cases.py::test_eight_rows_in_two_leading_dimensions_pass",
            "modules/test_layernorm_mlp.py::test_a_size_that_fp8_cannot_take_is_refused_naming_layer_operand_and_way_out",
            "modules/test_device_trouble.py::test_a_size_that_does_not_fit_names_the_layer_of_the_model",
        ),
    ),
    "B64": Case(
        "head counts that do not divide",
        (
            f"{ATTENTION}_arguments.py::test_the_constructor_refuses_what_cannot_be",
            f"{ATTENTION}_multihead_arguments.py::test_the_constructor_refuses_what_cannot_be",
            "modules/test_transformer.py::test_head_counts_that_do_not_divide_are_refused_at_construction",
            # tp_size
            f"{ATTENTION}_multihead_arguments.py::test_a_constructor_argument_of_a_later_feature_is_refused_by_name",
        ),
    ),
    "B68": Case(
        "a finite mask fill that leaks, rows with nothing to see",
        (
            f"{ATTENTION}.py::test_masked_keys_have_weight_zero_however_large_the_scores",
            f"{ATTENTION}.py::test_a_row_with_nothing_to_see_gives_zero_and_takes_no_gradient",
            "modules/test_transformer.py::test_a_sequence_of_nothing_but_padding_stays_finite_in_every_gradient",
        ),
    ),
    "B66": Case(
        'packed sequences that demand "padding" in the mask type',
        (
            f"{ATTENTION}_packed.py::test_a_mask_type_need_not_say_padding",
            f"{ATTENTION}_packed.py::test_each_sequence_attends_as_if_it_were_alone",
        ),
    ),
    "B70": Case(
        "a window that discards the caller's mask",
        (
            f"{ATTENTION}_windows.py::test_what_a_mask_hides_stays_hidden_in_a_window",
            f"{ATTENTION}_windows.py::test_a_window_joins_every_mask",
        ),
    ),
    "B72": Case(
        "fused and unfused rotary embedding that differ, gradients of it",
        (
            "modules/test_rope.py::test_a_rotation_is_a_complex_product_rounded_once_and_backward_turns_back",
            "modules/test_rope.py::test_gradients_agree_with_finite_differences_for_any_angles",
            "modules/test_rope.py::test_an_offset_is_the_first_position",
            "modules/test_rope.py::test_each_packed_sequence_turns_as_it_would_alone",
        ),
    ),
    "B74": Case(
        "dropped choices that are sorted wrongly, offsets that wrap",
        (
            "modules/test_moe_permute.py::test_dropped_choices_are_absent_and_a_token_without_any_gets_zeros",
            "modules/test_moe_permute.py::test_a_map_of_indices_is_that_of_a_loop_and_merges_by_its_choices",
            "modules/test_moe_permute.py::test_rows_are_found_by_64_bit_indices",
        ),
    ),
    "B77": Case(
        "a weight gradient of an expert without rows that is no zero",
        (
            f"{GROUPED}::test_gradients_of_groups_without_rows_are_exactly_zero_whatever_memory_held",
            f"{GROUPED}::test_main_grad_adds_and_overwrites_as_flags_say_also_without_rows",
        ),
    ),
    "B79": Case(
        "a stacked weight that gets no gradient",
        (
            f"{GROUPED}::test_stacked_parameters_get_the_gradients_of_separate_ones",
            f"{GROUPED}::test_main_grad_adds_and_overwrites_as_flags_say_also_without_rows",
            f"{GROUPED}::test_grad_added_to_main_grad_is_set_and_hooks_run_on_zeros",
            "modules/test_grouped_arguments.py::test_stacked_weights_in_fp8_are_refused_at_construction",
        ),
    ),
    "B82": Case(
        "quantized weights that survive offload",
        ("modules/test_weight_cache.py::test_the_memory_of_a_kept_weight_is_free_once_the_module_moves",),
    ),
    "B84": Case(
        "FP8 takes more memory than bf16",
        (
            "modules/test_quantized_weights.py::test_a_weight_takes_1_byte_an_element_or_0_6_and_its_making_one_layer_more",
            "modules/test_quantized_weights.py::test_converting_layer_by_layer_takes_one_quantized_layer_more",
            "modules/test_memory_report.py::test_the_bytes_are_those_of_all_tensors_that_are_alive",
        ),
    ),
    "B90": Case(
        "backend signatures that drift",
        ("dispatch/test_signature.py::test_a_drifted_kernel_is_refused_naming_backend_op_and_parameter",),
    ),
    "B91": Case(
        "strict and fallback",
        (
            "dispatch/test_policy.py::test_an_op_that_raises_gives_its_own_error_at_once_and_runs_nowhere_else",
            "dispatch/test_policy.py::test_a_fallback_that_raises_gives_its_own_error",
            "dispatch/test_policy.py::test_the_next_listed_backend_that_can_takes_over_and_every_call_is_counted",
            "dispatch/test_policy.py::test_nobody_left_is_one_error_with_every_reason",
            "dispatch/test_discovery.py::test_a_backend_that_fails_to_load_is_listed_with_its_reason_and_the_rest_works",
            "modules/test_plan.py::test_a_listed_fallback_takes_the_missing_kernel_and_counts",
        ),
    ),
    "B92": Case(
        "device kernels that are plausible but wrong",
        (
            "testing/test_plausible_faults.py::test_a_run_of_the_kit_names_the_op",
            "testing/test_plausible_faults.py::test_a_run_beside_the_reference_names_the_op",
            "testing/test_plausible_faults.py::test_denying_the_op_gives_right_results_again",
            "dispatch/test_policy_lists.py::test_a_denied_op_goes_to_the_fallback_counted_and_announced",
            "dispatch/test_processes.py::test_a_policy_file_and_variables_are_in_force_from_the_start",
        ),
    ),
    "B95": Case(
        'an environment variable "0" taken for true, a misspelt one ignored',
        (
            "schema/test_environment.py::test_a_flag_is_parsed_as_meant",
            "schema/test_environment.py::test_misspelt_names_give_one_warning_that_lists_them_and_the_right_ones",
            "schema/test_environment.py::test_every_variable_of_the_table_has_a_field_and_every_field_a_variable",
        ),
    ),
    "B98": Case(
        "an import that needs a driver, a compiler or a library off the loader's path",
        (
            "ffi/test_binding.py::test_without_the_binding_all_but_the_native_backends_works_and_says_why",
            "backends/test_musa.py::test_torch_musa_is_imported_only_when_its_devices_are_asked_for",
            "backends/test_musa.py::test_a_missing_kernel_library_names_the_command_that_builds_it",
        ),
    ),
    "B101": Case(
        "a loader that blames a file that is there for the dependency that is not",
        (
            "ffi/test_loader.py::test_a_missing_file_is_named",
            "ffi/test_loader.py::test_a_missing_dependency_is_named_and_told_from_a_missing_file",
            "ffi/test_loader.py::test_a_library_for_another_machine_names_both_machines",
            "ffi/test_loader.py::test_an_undefined_symbol_is_named",
            "ffi/test_loader.py::test_a_library_that_is_cut_short_is_refused",
            "ffi/test_loader.py::test_a_wrong_table_is_refused_and_the_refusal_says_why",
        ),
    ),
    "B102": Case(
        "first use of a library from several threads",
        (
            "ffi/test_threads.py::test_sixteen_threads_make_the_first_call_at_once",
            "ffi/test_threads.py::test_threads_that_call_kernels_at_once_get_their_own_results",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_tests_that_exist(name):
    assert CASES[name].tests
    assert missing(CASES[name].tests) == []


def test_every_open_part_names_an_issue():
    assert {issue for case in CASES.values() for issue in case.later.values()} <= {TRANSFORMER, WHOLE_SET}


def test_overflow_saturates_and_nan_stays_nan():
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), torch.float8_e4m3fn)
    codes = quantizer(torch.tensor([[1000.0, 448.0, 464.0, 465.0, -1000.0, float("nan")]]))._data
    assert bytes(codes.flatten().tolist()).hex() == "7e7e7e7efe7f"


CHOSEN = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("what", ["input", "row", "weight"])
def test_zero_inputs_rows_and_weights_stay_zero_and_finite(what, name):
    module, x = te.Linear(64, 64, bias=False), torch.randn(16, 64)
    with torch.no_grad():
        {"input": x, "row": x[3], "weight": module.weight}[what].zero_()
    x.requires_grad_()
    for _ in range(2):
        with te.autocast(recipe=CHOSEN[name]()):
            y = module(x)
        y.sum().backward()
    assert not (y[3] if what == "row" else y).any()
    assert all(value.isfinite().all() for value in (y, x.grad, module.weight.grad))
    if name == "delayed" and what != "row":
        assert module.fp8_meta["scaling_fwd"].scale[0 if what == "input" else 1] == 1.0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 3.4028234663852886e38, 149.3333282470703]),
        ({"power_of_2": True}, [1, 1, 1, 2.0**127, 128]),
        ({"epsilon": 4.0}, [112, 1, 1, 112, 112]),
    ],
    ids=["plain", "power_of_2", "epsilon"],
)
def test_scales_at_the_edges(settings, expected):
    amax = torch.tensor([0.0, float("nan"), float("inf"), 1e-37, 3.0])
    assert torch.equal(te_hal.ops.compute_scale(amax, fp8_max=448.0, **settings), torch.tensor(expected))


def test_a_bf16_bias_is_added_to_an_fp32_result_exactly():
    ones, bias = torch.ones(16, 16, dtype=torch.bfloat16), torch.arange(16, dtype=torch.bfloat16)
    result = te_hal.ops.gemm(ones, ones, bias=bias, out_dtype=torch.float32)
    assert torch.equal(result, (16 + torch.arange(16.0)).expand(16, 16))


def test_a_columnwise_only_tensor_of_one_scale_has_its_shape_and_no_rowwise_buffer():
    source = torch.randn(128, 256)
    q = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, rowwise=False)(source)
    assert (q.shape, q.size(0), q._data) == ((128, 256), 128, None)
    assert (q.dequantize() - source).norm() < 0.05 * source.norm()


def test_calibration_records_the_largest_magnitude_of_negative_inputs():
    module, x = te.Linear(32, 16), torch.full((8, 32), -5.0)
    x[3, 4] = 0.1
    with te.autocast(enabled=False, calibrating=True):
        y = module(x)
    assert module.fp8_meta["scaling_fwd"].amax_history[0, 0] == 5.0
    assert torch.equal(y, module(x))


def test_eight_rows_in_two_leading_dimensions_pass():
    with te.autocast():
        assert te.Linear(256, 256)(torch.randn(2, 4, 256)).shape == (2, 4, 256)
