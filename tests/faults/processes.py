"""Faults that tests on real processes make: which tests they are, and what came of each."""

import os
import re
import sys
from collections.abc import Iterator

from tests.compat.environments import ROOT
from tests.compat.lanes import Case, outcome, reported
from tests.faults.kinds import Kind

FOLDER = ROOT / "build" / "faults"
DISTRIBUTED = "tests/distributed"
LOG_VARIABLE = "SHARDCORE_LOG"
# For each part its test files, and of some the functions that are about a fault. A test without a
# fault is left out, and so is the quick part of another part of `make faults`.
TESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "signals": {
        "ends/test_sigterm.py": (),
        "ends/test_resumed_after_sigterm.py": (),
        "ends/test_workers.py": (),
        "ends/test_exit.py": (),
        "failure/test_interrupt.py": (),
    },
    "ranks": {
        "failure/test_failure.py": (
            "test_by_hand_an_exception_ends_all_ranks_and_all_name_it",
            "test_the_finally_blocks_of_the_other_ranks_run",
            "test_a_rank_that_swallows_the_interrupt_ends_all_the_same",
            "test_by_hand_a_third_rank_hears_it_too",
            "test_by_hand_a_killed_rank_is_missed",
            "test_by_hand_a_rank_that_is_asked_to_end_is_named",
            "test_by_hand_the_death_of_a_rank_is_reported_before_the_error_it_causes",
            "test_by_hand_a_rank_that_exits_is_named_by_the_rank_that_waits_for_it",
            "test_by_hand_an_interrupt_ends_all_ranks",
            "test_by_hand_a_rank_that_swallows_the_consequence_fails_all_the_same",
            "test_torchrun_an_exception_ends_all_ranks_and_comes_first",
            "test_torchrun_a_rank_that_leaves_ends_all",
            "test_a_failing_rank_ends_though_its_log_is_never_read",
        ),
        "failure/test_late_ranks.py": (),
        "failure/test_one_rank_alone.py": (
            "test_a_call_that_needs_all_ranks_names_both_calls_and_lines",
            "test_a_save_of_a_sharded_model_needs_all_ranks",
            "test_a_write_that_fails_alone_or_together_is_the_error_of_all_that_come",
            "test_ranks_with_other_epochs_are_an_error_before_the_first_step",
            "test_a_callback_that_predicts_on_one_rank_is_an_error",
            "test_a_rank_that_waits_in_another_collective_is_named_with_its_line",
            "test_ranks_that_make_other_collectives_in_a_loop_get_an_error_that_names_both",
            "test_a_rank_that_has_ended_is_named",
        ),
        "failure/test_ranks_that_diverge.py": (
            "test_a_generator_that_one_rank_draws_from_is_found_before_the_next_epoch",
            "test_a_variable_that_one_rank_assigns_is_found_before_the_next_epoch",
            "test_a_thread_without_the_order_of_the_others_may_not_assign",
        ),
        "failure/test_restart.py": (),
        "failure/test_process_group.py": (
            "test_ranks_that_never_come_are_reported_with_the_remedy",
            "test_a_port_that_accepts_and_never_answers_is_an_error_after_the_timeout",
            "test_all_ranks_say_which_rank_names_a_wrong_interface_and_what_its_host_has",
            "test_a_wrong_interface_is_said_also_if_the_others_never_come",
        ),
        "failure/test_ranks.py": (
            "test_a_rank_that_dies_is_named_before_the_errors_that_follow_from_it",
            "test_the_stacks_of_a_rank_that_crashes_are_shown",
            "test_the_stacks_of_ranks_that_time_out_are_shown",
        ),
        "ends/test_agreement.py": (
            "test_a_rank_that_stops_alone_is_named",
            "test_ranks_that_agree_in_other_ways_get_an_error",
        ),
        "failure/test_strangers.py": (),
    },
    "disks": {
        "ends/test_first_cause.py": (),
        "files/test_files_after_a_crash.py": (),
        "files/test_backups.py": (
            "test_a_fit_that_is_stopped_again_and_again_is_that_of_no_stop",
            "test_a_fit_that_begins_at_a_later_epoch_is_resumed_there",
            "test_ranks_that_found_different_backups_are_an_error_that_names_them",
            "test_a_damaged_backup_gives_way_to_the_one_before_on_all_ranks",
        ),
        "files/test_files.py": (
            "test_saving_on_one_rank_only_is_an_error_within_the_timeout",
            "test_a_failed_write_leaves_the_old_file",
            "test_a_rank_that_ignores_the_error_of_another_rank_raises_it_later",
        ),
        "files/test_files_of_rank_0.py": (
            "test_a_file_that_cannot_be_written_is_one_error_on_every_rank_and_all_go_on",
        ),
        "files/test_export.py": ("test_an_export_that_fails_on_rank_0_fails_on_every_rank",),
        "files/test_legacy_files.py": ("test_a_kill_in_the_save_leaves_the_old_file",),
        "checkpoints/test_checkpoint_callback.py": (
            "test_a_fit_that_was_ended_goes_on_at_the_next_step",
            "test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before",
            "test_an_error_of_one_ranks_thread_is_raised_on_all_ranks",
        ),
        "checkpoints/test_checkpoint_cli.py": (
            "test_inspect_shows_variables_and_verify_finds_a_flipped_bit",
            "test_convert_refuses_a_flipped_bit_and_a_shard_of_another_step",
        ),
        "checkpoints/test_checkpoints.py": (
            "test_a_damaged_checkpoint_is_an_error_on_all_ranks",
            "test_another_model_is_an_error_that_names_the_variables",
        ),
        "checkpoints/test_hostile_files.py": (
            "test_a_pipe_is_an_error_of_a_load_and_of_the_commands",
            "test_a_file_of_keras_that_links_to_itself_or_is_a_pipe_is_an_error",
            "test_no_escape_sequence_of_a_file_or_a_folder_reaches_the_terminal_or_the_log",
        ),
        "checkpoints/test_leases.py": (),
        "checkpoints/test_replaced_checkpoints.py": (),
        "checkpoints/test_saving_checkpoints.py": (
            "test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_leaves_the_latest",
            "test_ranks_that_save_other_things_are_an_error",
            "test_a_save_on_one_rank_only_is_an_error",
            "test_what_a_crash_has_left_is_skipped_then_removed_and_keep_counts_complete_ones",
        ),
    },
    "launches": {
        "launch/test_launch.py": (
            "test_the_error_of_a_rank_comes_once_and_a_further_cell_runs",
            "test_no_rank_outlives_an_interrupted_or_killed_program",
        ),
        "launch/test_new_ranks.py": ("test_no_rank_and_no_file_outlives_a_killed_program",),
    },
}


def kinds(part: str) -> Iterator[Kind]:
    """Runs the tests of a part, and yields one kind for each test with its arguments."""
    folder = FOLDER / part
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": paths}
    environment.pop(LOG_VARIABLE, None)  # tests read the log
    outcome(sys.executable, nodes(part), environment, folder)
    cases = reported(folder)
    if not cases:
        yield Kind.once(f"the tests of {part}", "pytest has reported no test")
    yield from (_kind(case) for case in cases if case.verdict != "skipped")


def nodes(part: str) -> list[str]:
    """Returns the files and functions of a part, as arguments of pytest."""
    return [
        node
        for file, functions in TESTS[part].items()
        for path in (f"{DISTRIBUTED}/{file}",)
        for node in ([f"{path}::{name}" for name in functions] or [path])
    ]


def _kind(case: Case) -> Kind:
    """Returns the kind of a test, which has its words and its arguments."""
    function, bracket, arguments = case.name.rpartition("::")[2].partition("[")
    words = function.removeprefix("test_").replace("_", " ")
    # Of a function in the arguments pytest has an address or no name.
    given = re.sub(r"<lambda>-?|-?<lambda>", "", arguments.removesuffix("]"))
    name = f"{words} ({given})" if bracket and given else words
    return Kind.once(name, None if case.verdict == "passed" else case.name)
