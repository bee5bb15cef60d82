"""Runs Keras' own tests over two ranks, and writes docs/reference/keras-tests.md.

python -m tests.keras_tests
python -m tests.keras_tests --variant "data parallel" --only layers/core --only losses
"""

import argparse
import os
import sys
import time

os.environ |= {"KERAS_BACKEND": "torch"}
os.environ.setdefault("SHARDCORE_LOG", "error")
# The tests' steps are few: else none of them would be captured.
os.environ.setdefault("SHARDCORE_CAPTURE", "at-once")
# A test that fails on one rank alone leaves the other waiting.
os.environ.setdefault("SHARDCORE_TIMEOUT", "20")

from tests import warm  # after the environment that Keras reads
from tests.keras_tests import page, results, running
from tests.keras_tests.variants import VARIANTS


def main() -> int:
    """Returns 1 if a test failed that is not explained."""
    parser = argparse.ArgumentParser("python -m tests.keras_tests", description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="else all of them")
    parser.add_argument("--only", action="append", help="files below keras/src that begin so")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no file later")
    given = parser.parse_args()
    warm.load()
    end = time.monotonic() + given.seconds
    failed = []
    for variant in given.variant or VARIANTS:
        for file in running.files(given.only or [""], only_operators="inputs" in variant):
            if time.monotonic() > end:
                break
            result = results.run_file(variant, file)
            failed += result.failures()
            results.store(variant, file, result)
            print(f"{variant}: {file}: {result.summary()}", flush=True)
    page.write(results.load())
    print("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
