"""The share of an epoch in which the device waits for its next batch."""

from collections.abc import Iterator
from typing import Any

from benchmarks import cases, contenders, keras_training, peers
from benchmarks.contender import CAPTURED, HAND, KERAS, Contender
from benchmarks.lanes import LaneFailed, open_forked
from benchmarks.rows import Row

SOURCES = ("arrays", "two workers")
# The most of an epoch that may be spent between steps: of a GPU, which computes while the host
# draws, and of a CPU, where one core does both.
LIMITS = {"cuda": 0.02, "cpu": 0.05}
STEPS = 60
SETTLING = 4  # steps, of which the first are recorded


def rows(quick: bool, strategy: str, device: str) -> Iterator[Row]:
    """Yields the share of each model, source and contender, on one device."""
    layout = "whole" if device == "cpu" else "megatron"
    ours = "single" if device == "cpu" else strategy
    racing = [
        Contender(KERAS, open_forked(keras_training.train, 1, "whole")),
        Contender(HAND, open_forked(peers.train, 1, "whole")),
        Contender(CAPTURED, contenders.keras(1, layout, ours), captured=True),
    ]
    for case in (cases.MLP, cases.CNN):
        sized = cases.quick(case) if quick else case
        for source in SOURCES:
            section = f"{case.name}, {device}, input from {source}"
            for contender in racing:
                yield _row(section, contender, sized, source, device, 8 if quick else STEPS)


def _row(
    section: str, contender: Contender, case: Any, source: str, device: str, steps: int
) -> Row:
    try:
        lane = contender.open_lane(case, device)
        try:
            lane.ask("epoch", SETTLING)
            share = lane.ask("waiting", steps, source)
        finally:
            lane.close()
    except LaneFailed as failed:
        return Row(section, contender.name, note=str(failed))
    if contender.name != CAPTURED:
        return Row(section, contender.name, share, "%")
    limit = LIMITS[device]
    return Row(section, contender.name, share, "%", f"{limit:.0%}", share / limit, 1.0)
