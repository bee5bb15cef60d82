"""Runs the tests with other releases of torch and Keras, each pair in its own environment.

    python3 -m tests.compat --torch 2.15.0 --keras 3.15.1
    python3 -m tests.compat --torch newest --keras nightly    # the canary: what broke, by name
    python3 -m tests.compat --all                             # the table, and the page
    python3 -m tests.compat --page                            # the page, with what has been run

It needs Python and pip alone, and git.
"""

import argparse
import sys

from tests.compat import page
from tests.compat.environments import Pair
from tests.compat.lanes import LANES, run

# The first is the oldest pair, the last the newest.
PAIRS = (
    Pair("2.10.0", "3.13.2"),
    Pair("2.11.0", "3.13.2"),
    Pair("2.12.1", "3.15.1"),
    Pair("2.13.0", "3.13.2"),
    Pair("2.13.0", "3.14.1"),
    Pair("2.13.0", "3.15.1"),
    Pair("2.14.1", "3.15.1"),
    Pair("2.15.0", "3.15.1"),
)


def main() -> int:
    """Returns 1 if a test failed, or `install()` refused."""
    parser = argparse.ArgumentParser("python3 -m tests.compat", description=__doc__.split("\n")[0])
    parser.add_argument("--torch", default="newest")
    parser.add_argument("--keras", default="newest")
    parser.add_argument("--all", action="store_true", help="the table of pairs, and the page")
    parser.add_argument("--lane", choices=LANES, action="append", help="else all of them")
    parser.add_argument("--page", action="store_true", help="the page alone, by earlier results")
    options = parser.parse_args()
    if options.page:
        page.write()
        return 0
    pairs = PAIRS if options.all else [Pair(options.torch, options.keras)]
    passed = [run(pair, options.lane or LANES) for pair in pairs]
    if options.all:
        page.write()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
