"""Known traps in training: recipes, state, checkpoints, gradients, optimizers, memory."""

from __future__ import annotations

from known_case import Case

GROUPED = "modules/test_grouped_linear.py"
FP8 = "modules/test_linear_fp8.py"
AUTOCAST = "quantization/test_autocast.py"
STATE = "modules/test_state_dict.py"

CASES = {
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
            "modules/test_quantized_weights.py::test_a_weight_takes_1_byte_an_element_or_0_6_and_its_making_little_more_than_one_layer",
            "modules/test_quantized_weights.py::test_converting_layer_by_layer_takes_one_layer_more",
            "modules/test_memory_report.py::test_the_bytes_are_those_of_all_tensors_that_are_alive",
        ),
    ),
}
