"""Known traps in what is computed: codes, scales, products, attention, experts."""

from __future__ import annotations

from known_case import Case

CAST = "backends/cpu_reference/test_cast.py"
AMAX = "backends/cpu_reference/test_amax.py"
MXFP8 = "backends/cpu_reference/test_mxfp8_cast.py"
ATTENTION = "modules/test_attention"
FP8 = "modules/test_linear_fp8.py"

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
    "B54": Case(
        "fused cross entropy that writes its gradients wrongly",
        (
            "modules/test_cross_entropy.py::test_losses_and_gradients_are_torchs_in_float64_and_logits_stay_as_they_are",
            "modules/test_cross_entropy.py::test_an_ignored_row_gives_exactly_zero_whatever_its_logits",
            "modules/test_cross_entropy.py::test_recorded_losses_and_gradients_are_reproduced",
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
    "B66": Case(
        'packed sequences that demand "padding" in the mask type',
        (
            f"{ATTENTION}_packed.py::test_a_mask_type_need_not_say_padding",
            f"{ATTENTION}_packed.py::test_each_sequence_attends_as_if_it_were_alone",
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
}
