"""Known traps below the modules: choosing a backend, policies, variables, loading libraries."""

from __future__ import annotations

from known_case import Case

CASES = {
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
    "B104": Case(
        "torch.compile around modules",
        (
            "modules/test_compile.py::test_a_module_breaks_the_graph_once_since_it_runs_as_it_stands",
            "modules/test_compile.py::test_every_module_and_op_is_among_these",
            "modules/test_torch_interop.py::test_torch_compile_runs_modules_as_they_stand",
            "modules/test_torch_interop.py::test_fullgraph_says_that_a_module_cannot_be_compiled",
        ),
    ),
}
