"""One CUDA device, if there is one, on a mesh of (1, 1).

A separate interpreter measures it: the one that measures the CPU hides the devices.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import attrs

from benchmarks import cases, contenders, keras_training, peers, waiting
from benchmarks.contender import CAPTURED, HAND, INDUCTOR, KERAS, Contender, Goal
from benchmarks.lanes import open_forked
from benchmarks.rows import Row
from benchmarks.sections import Options

STEPS = 20


def section(options: Options) -> Iterator[Row]:
    """The rows of the other interpreter; one line where there is no device."""
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if not environment.get("CUDA_VISIBLE_DEVICES"):
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    asked = json.dumps({**attrs.asdict(options), "measured": {}})
    command = [sys.executable, "-m", "benchmarks.cuda", asked]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    options.measured.update(answer["measured"])
    yield from (Row(**row) for row in answer["rows"])


def main() -> None:
    """Measure, and print the answer as JSON."""
    import torch

    asked = json.loads(sys.argv[1])
    options = Options(**{**asked, "without": tuple(asked["without"])})
    found: list[Row] = []
    if torch.cuda.is_available():
        found = list(on_device(options, "cuda"))
    else:
        print("CUDA: skipped, torch sees no device", file=sys.stderr)
    print(json.dumps({"rows": [attrs.asdict(row) for row in found], "measured": options.measured}))


def on_device(options: Options, device: str) -> Iterator[Row]:
    """Every model against plain Keras and against PyTorch by hand; then how long it waits."""
    for case in map(options.size, (cases.MLP, cases.CNN, cases.DECODER)):
        section = f"{case.name}, {device}"
        longer = attrs.evolve(case, steps=STEPS)
        yield from options.race(section, longer, _racing(options), device=device)[0]
    yield from waiting.rows(options.quick, options.strategy, device)


def _racing(options: Options) -> list[Contender]:
    # One rank makes a mesh of (1, 1) of this layout.
    mesh, goals = "megatron", (Goal(KERAS), Goal(HAND))
    captured = contenders.keras(1, mesh, options.strategy)
    inductor = contenders.keras(1, mesh, options.strategy, jit_compile=True)
    return [
        Contender(KERAS, open_forked(keras_training.train, 1, "whole")),
        Contender(HAND, open_forked(peers.train, 1, "whole"), (Goal(KERAS),)),
        Contender(CAPTURED, captured, goals, captured=True),
        Contender(INDUCTOR, inductor, goals, captured=True),
    ]


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "torch")
    main()
