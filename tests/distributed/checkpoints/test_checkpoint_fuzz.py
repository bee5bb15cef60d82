"""Damaged files of a checkpoint: the quick part of `tests.faults.files.checkpoint_files`."""

from tests.faults.files import checkpoint_files


def test_damaged_files_are_an_error_with_a_name_or_the_right_values():
    found, added = checkpoint_files.run(cases=60, seed=7)
    assert len(found) == 60
    assert [each for each in found if each[1] not in ("error", "right")] == []
    assert {what for _, what in found} == {"error", "right"}
    assert added < checkpoint_files.MEBIBYTES
