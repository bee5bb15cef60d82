"""Launches ranks again and again, with errors and interrupts in between: none is left.

KERAS_BACKEND=torch python -m tests.faults.launches     50 times
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.distributed.launch.test_new_ranks import launch_again
from tests.faults.kinds import Kind, tried


def run(times: int) -> list[Kind]:
    """Launches ranks so many times after a failure, and so many times after an interrupt."""
    with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as folder:
        launch_again(Path(folder), times)
    return [Kind(f"a launch after {what}", times, times) for what in ("an error", "an interrupt")]


def kinds(times: int) -> Iterator[Kind]:
    """Yields the kinds of launches that failed before."""
    yield from tried("launches after errors and interrupts", 2 * times, lambda: run(times))


if __name__ == "__main__":
    for kind in kinds(50):
        print(kind)
