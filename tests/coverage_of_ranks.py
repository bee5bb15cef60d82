"""Saves the line coverage of forked ranks: they are killed as soon as a test has their results."""

import multiprocessing
import os


def save_before_results() -> None:
    """Makes each rank save its data before it sends its result, if coverage is measured."""
    # Set by coverage; without it the package need not be installed.
    if "COVERAGE_RUN" not in os.environ:
        return
    from coverage import Coverage

    from shardcore.adapters import forked_ranks as ranks

    flush = ranks._flush

    def flush_and_save() -> None:
        flush()
        current = Coverage.current()
        if current is not None and multiprocessing.parent_process() is not None:
            current.save()

    ranks._flush = flush_and_save
