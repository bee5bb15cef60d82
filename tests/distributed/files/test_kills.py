"""Ranks that are killed while they train or save: the quick part of `make faults`."""

import pytest

from tests.faults import kills, saves


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["BackupAndRestore", "checkpoint"])
def test_a_kill_at_a_random_moment_of_a_save_leaves_the_old_or_the_new_one(way, ranks):
    assert saves.run(way, ranks, kills=1).problems == ()


def test_a_training_whose_ranks_are_killed_ends_with_the_weights_of_an_undisturbed_one():
    kills.run("ShardedCheckpoint", kills=1, epochs_each=8, every=1)
