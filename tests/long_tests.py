"""The distributed tests that `make test` leaves out, and `make test-long` runs.

`make test` takes twenty minutes at most on two cores. A quicker test, or another target of make,
covers the subject of each of these.
"""

# By the end of a test's name, without its parameters if all count, or by a file: what covers it.
LONG_TESTS = {
    "capture/idioms/test_idioms.py::"
    "test_ordinary_programs_are_captured_on_two_ranks": "one process",
    "capture/states/test_changers.py::test_a_step_sees_what_a_thread_or_a_signal_handler_changed": (
        "code of the user before the step"
    ),
    "capture/states/test_changers.py::"
    "test_a_step_sees_what_code_of_the_user_changed_on_two_ranks": "one process",
    "capture/states/test_stale_states.py::"
    "test_no_change_between_epochs_is_missed_on_two_ranks[manual-10]": "dtensor",
    "capture/test_captured.py::"
    "test_a_step_that_branches_on_a_count_is_captured_for_each_branch[warmed up]": (
        "the other counts"
    ),
    "capture/test_captured.py::"
    "test_captured_steps_have_the_numbers_of_eager_ones[decoder-shape5]": (
        "the matrix of captured models"
    ),
    "capture/test_captured.py::"
    "test_captured_steps_have_the_numbers_of_eager_ones[mlp-shape2]": "the other meshes",
    "capture/test_captured.py::"
    "test_captured_steps_have_the_numbers_of_eager_ones[scaled-shape3]": "the other models",
    "capture/test_captured_changes.py::"
    "test_a_change_between_steps_is_seen_by_the_next_step[shape1-changes1]": "one process",
    "capture/test_captured_host.py::"
    "test_a_compiled_step_calls_python_for_what_inductor_leaves_to_torch_alone": (
        "the counts of `benchmarks`"
    ),
    "capture/test_captured_host.py::"
    "test_a_step_of_many_layers_calls_no_more_python[data parallel]": "one process",
    "capture/test_captured_host.py::"
    "test_a_step_of_many_layers_calls_no_more_python[megatron]": "one process",
    "capture/test_captured_names.py::test_a_step_sees_what_its_functions_read[dtensor]": "single",
    "capture/test_captured_names.py::test_a_step_sees_what_its_functions_read[manual]": "single",
    "capture/test_captured_names.py::"
    "test_a_value_that_no_guard_can_compare_keeps_a_step_eager_with_a_message[manual]": "dtensor",
    "capture/test_captured_states.py::"
    "test_steps_take_every_transition_and_no_other[shape1-walks1]": "one process",
    "capture/test_captured_values.py::"
    "test_a_step_takes_the_branch_that_its_gradients_choose[shape1-15]": "one process",
    "capture/test_captured_values.py::"
    "test_values_that_torch_or_keras_reads_for_itself_are_no_reason_to_run_"
    "eagerly[shape1-cases1]": "one process",
    "checkpoints/test_checkpoint_callback.py::"
    "test_a_fit_that_was_ended_goes_on_at_the_next_step[arrays-7-options1-ended1-None]": "arrays-8",
    "checkpoints/test_checkpoint_callback.py::"
    "test_a_fit_that_was_ended_goes_on_at_the_next_step[generator-9-options4-ended4-resumed4]": (
        "arrays-8"
    ),
    "checkpoints/test_checkpoint_callback.py::"
    "test_a_fit_that_was_ended_goes_on_at_the_next_"
    "step[steps per epoch-6-options3-ended3-resumed3]": "arrays, generators",
    "compiled/test_compiled.py": "compiled/test_compiled_steps.py",
    "compiled/test_compiled_images.py": "compiled/test_compiled_steps.py",
    "compiled/test_compiled_once.py": "compiled/test_compiled_steps.py",
    "cuda/test_cuda_recurrent.py": "the matrix of layers",
    "data/test_sources.py::"
    "test_each_process_brings_its_own_rows[mesh1-dict-cuts1]": "the other meshes",
    "data/test_sources.py::"
    "test_every_way_of_giving_data_with_a_last_batch_smaller_than_the_mesh": "the other sources",
    "data/test_sources.py::"
    "test_the_whole_batch_on_every_process_from_any_source": "a rank's own rows",
    "ends/test_resumed_after_sigterm.py": "ends/test_sigterm.py",
    "failure/test_failure.py::"
    "test_an_error_that_cannot_be_read_is_shown_and_named_as_far_as_it_can"
    "[NoFacts-NoFacts: the cause-NoFacts: the cause]": "NoNotes",
    "failure/test_failure.py::"
    "test_an_error_that_cannot_be_read_is_shown_and_named_as_far_as_it_can"
    "[gloo without a text-<exception str() failed>-<exception str() failed>]": "NoText",
    "failure/test_failure.py::"
    "test_by_hand_an_orderly_end_is_quiet[together-new_interpreter]": "forked ranks",
    "failure/test_late_ranks.py::"
    "test_a_rank_whose_connection_breaks_names_the_rank_that_did_not_come": "a stopped rank",
    "failure/test_late_ranks.py::"
    "test_a_stopped_rank_is_named_with_the_collective_and_the_layer[step_of_own_loop]": (
        "a captured step"
    ),
    "failure/test_late_ranks.py::"
    "test_a_stopped_rank_is_named_with_the_collectives_of_a_compiled_step": "the other steps",
    "failure/test_late_ranks.py::"
    "test_collectives_of_the_users_own_that_do_not_match_are_said_to[True]": "False",
    "failure/test_late_ranks.py::"
    "test_of_ranks_that_wait_in_a_collective_the_lowest_says_for_whom[2]": "rank 0",
    "failure/test_late_ranks.py::"
    "test_rank_0_ends_too_if_another_process_holds_the_store_and_is_stopped": (
        "ranks whose store does not answer"
    ),
    "files/test_backups.py::"
    "test_a_fit_that_is_stopped_again_and_again_is_that_of_no_stop[1-arrays-1]": "two ranks",
    "files/test_backups.py::"
    "test_a_fit_that_is_stopped_again_and_again_is_that_of_no_stop[1-generator-2]": "two ranks",
    "files/test_backups.py::"
    "test_each_rank_may_have_a_path_of_its_own_for_all_callbacks": "one path for all",
    "files/test_kills.py": "make faults",
    "files/test_legacy_files.py::"
    "test_plain_keras_and_a_mesh_read_what_one_rank_writes[new/folder/m.hdf5]": "m.h5",
    "generation/test_while_loops.py::"
    "test_the_next_loop_sees_other_tensors_numbers_and_attributes": (
        "the tests of changes between steps"
    ),
    "guides/test_benchmarks.py": "make bench",
    "guides/test_docs.py::test_the_code_of_install_runs_in_a_new_interpreter": "the other pages",
    "guides/test_keras_guide.py::test_training": "tests/distributed/keras_distribution",
    "guides/test_tutorials.py::"
    "test_the_commands_of_the_page_print_what_it_shows[tutorials/one-to-eight.md]": (
        "the other pages"
    ),
    "guides/test_tutorials.py::"
    "test_the_commands_of_the_page_print_what_it_shows[tutorials/transformer.md]": (
        "the other pages"
    ),
    "failure/test_exchange.py::"
    "test_a_value_of_any_size_reaches_all_ranks_and_leaves_nothing[60000000]": "8,400,000 bytes",
    "idioms/test_refusals.py::test_wrappers_and_collectives_of_torch[manual]": "dtensor",
    "idioms/test_tensor_walk.py::test_each_name_in_each_layout": "two of its layouts",
    "idioms/test_tensor_walk.py::test_each_name_of_a_tensor[first-manual]": "dtensor",
    "inspection/test_explain.py::"
    "test_simulated_ranks_move_what_real_ranks_move[mlp-mesh0-fully_sharded-manual]": "dtensor",
    "inspection/test_explain.py::"
    "test_the_explanation_lists_the_collectives_that_are_"
    "counted[decoder-mesh3-tensor_parallel-manual]": (
        "the MLP under manual, the decoder under dtensor"
    ),
    "keras_distribution/test_keras_own_tests.py::"
    "test_the_same_tests_of_keras_pass_as_without_shardcore[saving]": "tests/distributed/files",
    "keras_distribution/test_keras_own_tests.py::"
    "test_the_same_tests_of_keras_pass_as_without_shardcore[trainers]": (
        "tests/distributed/training"
    ),
    "keras_distribution/test_keras_tests_on_ranks.py::"
    "test_a_test_that_fails_on_one_rank_does_not_hide_those_behind_it": "make keras-tests",
    "keras_distribution/test_keras_tests_on_ranks.py::"
    "test_pass_in_each_variant[inputs: pending sums-ops/core_test.py-60]": "make keras-tests",
    "keras_distribution/test_keras_tests_on_ranks.py::"
    "test_pass_in_each_variant[manual-layers/core/embedding_test.py-20]": "make keras-tests",
    "keras_distribution/test_keras_tests_on_ranks.py::test_pass_in_each_variant"
    "[variables sharded-layers/normalization/batch_normalization_test.py-5]": "make keras-tests",
    "launch/test_engines.py::test_a_model_stays_in_the_ranks_from_cell_to_cell[function]": "cell",
    "launch/test_taken_over.py::test_plans_and_estimates_of_another_process_are_those_of_a_fork": (
        "new interpreters that train"
    ),
    "layers/test_torch_modules.py::"
    "test_wrapped_modules_train_as_on_one_device[mesh1-rules1]": "the other mesh",
    "matrix/fast/test_captured.py::test_a_change_that_no_step_sees_is_found": "the other faults",
    "matrix/fast/test_captured.py::test_compiled": "compiled/test_compiled_steps.py",
    "matrix/fast/test_captured.py::test_over_four_ranks_of_which_some_have_more_rows": "two ranks",
    "matrix/fast/test_captured.py::test_over_two_ranks[captured layers]": "one device",
    "matrix/fast/test_captured.py::"
    "test_over_two_ranks[captured models]": "tests/distributed/traffic",
    "matrix/fast/test_captured.py::test_over_two_ranks[captured optimizers]": "one device",
    "matrix/fast/test_manual.py": "the contract of manual",
    "matrix/fast/test_matrix_bites.py": "the matrices themselves",
    "matrix/fast/test_parity.py": "the matrices themselves",
    "operators/test_engine_operators.py::"
    "test_operators_give_what_they_give_on_plain_tensors[2-LocalShards]": "three ranks",
    "passes/test_capture_memory.py::"
    "test_a_step_of_a_language_model_holds_less_captured": "the other models",
    "passes/test_fused_adam.py::test_it_gives_what_keras_gives[by hand]": "dtensor",
    "passes/test_fused_adam.py::"
    "test_it_gives_what_keras_gives[columns over the batch axis]": "tensor parallel",
    "passes/test_fused_adam.py::test_it_gives_what_keras_gives[one device]": "data parallel",
    "planning/test_layout_search.py": "planning/test_policies.py",
    "planning/test_memory_estimate.py::"
    "test_the_estimate_is_what_torch_allocates_on_a_rank": "the other estimates",
    "planning/test_plan_shown.py::test_the_code_of_the_document_runs": "the other pages",
    "planning/test_policies.py::"
    "test_each_policy_gives_the_numbers_of_one_device_and_the_bytes_of_its_plan[dtensor-4]": (
        "two ranks"
    ),
    "planning/test_policies.py::"
    "test_each_policy_gives_the_numbers_of_one_device_and_the_bytes_of_its_plan[manual-2]": (
        "dtensor"
    ),
    "planning/test_policies.py::"
    "test_tensor_parallel_blocks_reduce_four_times": "traffic/test_moved_tensor_parallel.py",
    "planning/test_traced_steps.py::"
    "test_a_traced_step_moves_what_real_ranks_move[decoder-4]": "the MLP and the experts",
    "planning/test_traced_steps.py::"
    "test_a_traced_step_moves_what_real_ranks_move[mlp-2]": "the experts",
    "planning/test_traced_steps.py::"
    "test_blocks_that_a_trace_leaves_out_cost_what_they_cost_in_a_full_trace": (
        "blocks whose small weights are held"
    ),
    "planning/test_traced_steps.py::"
    "test_blocks_with_generated_names_are_traced_once": "blocks whose small weights are held",
    "planning/test_traced_steps.py::"
    "test_four_blocks_of_a_decoder_show_the_others": "blocks whose small weights are held",
    "plugins/test_contract_plugin.py::"
    "test_the_example_keeps_its_promises_where_it_is_installed": "strategies/test_contract.py",
    "precision/test_loss_scaling.py::test_a_compiled_step_skips_the_same_steps": "captured steps",
    "precision/test_loss_scaling.py::"
    "test_ranks_skip_the_steps_that_one_device_skips[manual-shape1]": "dtensor",
    "strategies/test_contract.py::"
    "TestManual::test_a_failing_rank_ends_all_with_its_error_first": "dtensor",
    "strategies/test_contract.py::TestManual::test_a_file_is_that_of_one_device": "dtensor",
    "strategies/test_contract.py::"
    "TestManual::test_both_at_once_give_the_numbers_of_one_device": "dtensor",
    "strategies/test_contract.py::"
    "TestManual::test_data_parallel_gives_the_numbers_of_one_device": "dtensor",
    "strategies/test_contract.py::TestManual::test_four_ranks_keep_every_promise": "dtensor",
    "strategies/test_contract.py::"
    "TestManual::test_model_parallel_gives_the_numbers_of_one_device": "dtensor",
    "strategies/test_contract.py::TestSingle::test_a_file_is_that_of_one_device": "dtensor",
    "strategies/test_contract_bites.py": "the contract itself",
    "strategies/test_install_environment.py::"
    "test_a_keras_that_cannot_be_imported_is_an_error_that_says_what_is_missing": (
        "the other environments"
    ),
    "strategies/test_install_environment.py::"
    "test_a_torch_without_distributed_gives_single_and_the_reason": "the other environments",
    "strategies/test_manual.py::"
    "test_without_dtensor_auto_takes_it_and_says_why": "the other environments",
    "strategies/test_nothing_left.py": "strategies/test_install.py",
    "traffic/test_moved_context_parallel.py": "cuda/test_cuda_attention.py",
    "traffic/test_moved_deferred_metrics.py::"
    "test_an_epoch_reduces_its_loss_and_metrics_once[manual]": "dtensor",
    "traffic/test_moved_deferred_metrics.py::"
    "test_results_that_one_rank_reads_are_reduced_on_all": "an epoch that all ranks read",
    "traffic/test_moved_expert_parallel.py": "planning/test_traced_steps.py, with experts",
    "traffic/test_moved_sums.py::test_metrics_are_those_of_one_device[manual]": "dtensor",
    "traffic/test_moved_tensor_parallel.py::"
    "test_a_block_takes_four_all_reduces[mesh1]": "the other mesh",
    "traffic/test_moved_tensor_parallel.py::"
    "test_a_block_takes_four_all_reduces[mesh2]": "the other meshes",
    "traffic/test_moved_tensor_parallel.py::"
    "test_a_block_takes_four_pairs_of_a_gather_and_a_scatter": "four all-reduces",
    "traffic/test_moved_tensor_parallel.py::"
    "test_a_recorded_step_of_uneven_rows_moves_the_same": "even rows",
    "training/test_adoption.py::"
    "test_a_loop_takes_a_model_an_optimizer_and_a_metric_of_before[momentum-0]": "adam",
    "training/test_adoption.py::"
    "test_a_loop_takes_a_model_an_optimizer_and_a_metric_of_before[momentum-1]": "adam",
    "training/test_adoption.py::"
    "test_a_loop_takes_a_model_an_optimizer_and_a_metric_of_before[rmsprop-0]": "adam",
    "training/test_adoption.py::"
    "test_a_loop_takes_a_model_an_optimizer_and_a_metric_of_before[rmsprop-1]": "adam",
    "training/test_adoption.py::"
    "test_a_model_that_was_trained_on_one_device_goes_on_in_shards[momentum-mesh0]": "adam",
    "training/test_adoption.py::"
    "test_a_model_that_was_trained_on_one_device_goes_on_in_shards[momentum-mesh1]": "adam",
    "training/test_adoption.py::"
    "test_a_model_that_was_trained_on_one_device_goes_on_in_shards[rmsprop-mesh0]": "adam",
    "training/test_adoption.py::"
    "test_a_model_that_was_trained_on_one_device_goes_on_in_shards[rmsprop-mesh1]": "adam",
    "training/test_payback.py::test_steps_are_recorded_where_it_pays[shape1]": "one process",
    "training/test_remat.py::"
    "test_captured_steps_hold_less_and_have_the_numbers_of_one_"
    "device[manual-mesh2-rules2-scope2]": "dtensor",
    "training/test_training.py::"
    "test_the_numbers_are_those_of_one_device_on_every_rank[cnn-4x1]": "the matrix of layers",
    "training/test_training.py::"
    "test_the_numbers_are_those_of_one_device_on_every_rank[gru-1x2]": "the matrix of layers",
    "training/test_training.py::"
    "test_weights_under_a_mask_count_as_on_one_device": "the matrix of losses",
}
