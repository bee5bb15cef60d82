"""Launches ranks again and again, with errors and interrupts in between: none is left.

KERAS_BACKEND=torch python -m tests.faults.launches --times 50
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.distributed.launch.test_new_ranks import launch_again


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.launches")
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        launch_again(Path(folder), options.times)
    launches, seconds = 3 * options.times, time.monotonic() - began
    print(f"{launches} launches, a third of them interrupted, a third failed: {seconds:.0f} s")


if __name__ == "__main__":
    main()
