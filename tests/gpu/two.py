"""Two devices beside one: losses and step times, data parallel and tensor parallel.

python -m tests.gpu.two two.json            a decoder that two GPUs can share with a gain
python -m tests.gpu.two two.json --small    one for CPUs

It needs no GPU: where there are not two, the ranks run as `shardcore.launch` runs them there.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import attrs
import keras
import numpy as np

import shardcore
from benchmarks import models

# The most by which a loss may differ from that of one device, of its value.
TOLERANCE = 1e-3


@attrs.frozen
class Size:
    """The size of the decoder, and of its training."""

    vocabulary: int
    width: int
    blocks: int
    length: int
    rows: int
    steps: int


LARGE = Size(vocabulary=8192, width=1024, blocks=8, length=256, rows=32, steps=20)
SMALL = Size(vocabulary=64, width=32, blocks=1, length=8, rows=8, steps=3)


@attrs.frozen
class Run:
    """A training.

    Args:
        layout: "one device", "data parallel" or "tensor parallel".
        device: The type of the device of a rank.
        losses: Those of the epochs.
        seconds: Those of a step of the last epoch.
    """

    layout: str
    device: str
    losses: list[float]
    seconds: float


def build(size: Size) -> Any:
    """Returns the compiled decoder."""
    heads = max(2, size.width // 64)
    model = models.decoder(size.vocabulary, size.width, size.blocks, heads, size.length)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    return model


def train(layout: str, size: Size) -> Run:
    """Trains on this rank, two epochs and one that is timed."""
    keras.utils.set_random_seed(1)
    _distribute(layout, size)
    model = build(size)
    tokens = np.random.default_rng(0).integers(
        0, size.vocabulary, (size.rows * size.steps, size.length + 1)
    )
    data, options = (tokens[:, :-1], tokens[:, 1:]), {"batch_size": size.rows, "verbose": 0}
    losses = model.fit(*data, epochs=2, **options).history["loss"]
    began = time.perf_counter()
    losses += model.fit(*data, epochs=1, **options).history["loss"]
    seconds = (time.perf_counter() - began) / size.steps
    return Run(layout, model.variables[0].value.device.type, losses, seconds)


def _distribute(layout: str, size: Size) -> None:
    """Sets the distribution; one device has none."""
    if layout == "data parallel":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    elif layout == "tensor parallel":
        ranks = keras.distribution.get_device_count()
        mesh = keras.distribution.DeviceMesh((1, ranks), ("data", "model"))
        plan = shardcore.plan(lambda: build(size), mesh, policy="tensor_parallel")
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=plan, batch_dim_name="data")
        )


def measure(size: Size) -> dict[str, Any]:
    """Returns the runs as plain data, beside one device, and what is wrong with their losses."""
    shardcore.install()
    one = shardcore.launch(train, 1, "one device", size)
    two = [
        shardcore.launch(train, 2, layout, size) for layout in ("data parallel", "tensor parallel")
    ]
    wrong = [problem for ranks in two for problem in problems(one[0], ranks)]
    runs = [ranks[0] for ranks in (one, *two)]
    rows = [attrs.asdict(run) | {"beside one": one[0].seconds / run.seconds} for run in runs]
    return {"runs": rows, "failed": wrong}


def problems(one: Run, ranks: list[Run]) -> list[str]:
    """Returns what is wrong with the losses of ranks, in words."""
    found = []
    for rank, run in enumerate(ranks):
        if run.losses != ranks[0].losses:
            found.append(f"{run.layout}: rank {rank} has other losses than rank 0")
    if not np.allclose(ranks[0].losses, one.losses, rtol=TOLERANCE, atol=0):
        found.append(f"{ranks[0].layout}: losses {ranks[0].losses}, on one device {one.losses}")
    return found


def main() -> None:
    """Writes the runs into a file."""
    parser = argparse.ArgumentParser("python -m tests.gpu.two")
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    found = measure(SMALL if options.small else LARGE)
    options.file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
