"""Runs tests and a benchmark on the GPUs of this machine, and writes docs/reference/gpu.md.

python -m tests.gpu
python -m tests.gpu --part contract --part layers
python -m tests.gpu --part two      on two GPUs: ten minutes, and one file to send
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
    names = (*parts.PARTS, parts.TWO)
    parser.add_argument("--part", choices=names, action="append", help="else all but two")
    chosen = parser.parse_args().part or list(parts.PARTS)
    needed = 2 if parts.TWO in chosen else 1
    if torch.cuda.device_count() < needed:
        none = "no CUDA device" if needed == 1 else "fewer than two CUDA devices"
        print(f"make gpu: torch sees {none} here, so nothing was run.")
        return 0
    failed = False
    for found in parts.run(chosen):
        page.write(found)
        failed = any(part["failed"] for part in found["parts"].values())
    if parts.TWO in chosen:
        print(f"Please send {parts.TWO_FILE}: see CONTRIBUTING.md.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
