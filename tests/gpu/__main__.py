"""Runs tests and a benchmark on the GPUs of this machine, and writes docs/reference/gpu.md.

python -m tests.gpu
python -m tests.gpu --part contract --part layers
"""

import argparse
import os
import sys

from tests.gpu import parts

os.environ.update(parts.environment())

import torch  # after the environment that it reads

from tests.gpu import page


def main() -> int:
    """Returns 1 if a test failed; 0 without a GPU, where it runs none."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=parts.PARTS, action="append", help="else all of them")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("make gpu: torch sees no CUDA device here, so nothing was run.")
        return 0
    found = parts.run(options.part or ())
    page.write(found)
    return 1 if any(each["failed"] for each in found["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
