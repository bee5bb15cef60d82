"""A program as newcomers write it, whole: four epochs with validation and callbacks."""

import os
import statistics
from collections.abc import Iterator

from benchmarks import cases, keras_training
from benchmarks.cases import Case
from benchmarks.contender import KERAS, Contender
from benchmarks.lanes import LaneFailed, open_forked
from benchmarks.rows import Row

EPOCHS = 4
LIMIT = 1.6
AT_ONCE = "shardcore, recorded at once"
WHERE_IT_PAYS = "shardcore, by default"


def train(
    case: Case, layout: str, device: str, strategy: str | None = None, when: str = ""
) -> keras_training.KerasTraining:
    """Returns a model of which a step is recorded where that pays, or `when` that says.

    Args:
        case: What is trained.
        layout: "whole" sets no distribution.
        device: Where it is trained.
        strategy: What shardcore is installed with; None leaves Keras alone.
        when: The value of SHARDCORE_CAPTURE.
    """
    os.environ["SHARDCORE_CAPTURE"] = when
    return keras_training.train(case, layout, device, strategy)


def rows(quick: bool, strategy: str, rounds: int) -> Iterator[Row]:
    """Yields the seconds of the program: plain Keras on one process, shardcore on two ranks."""
    case = cases.quick(cases.NEWCOMER) if quick else cases.NEWCOMER
    section = f"{case.name}, {EPOCHS} epochs with validation and callbacks"
    on_two = {"strategy": strategy, "ranks": 2, "layout": "data parallel"}
    racing = {
        KERAS: open_forked(train, 1, "whole"),
        WHERE_IT_PAYS: open_forked(train, **on_two),
        AT_ONCE: open_forked(train, **on_two, when="at-once"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in racing}
    try:
        for _ in range(1 if quick else rounds):
            for name, open_lane in racing.items():
                lane = Contender(name, open_lane).open_lane(case, "cpu")
                try:
                    seconds[name].append(lane.ask("program", EPOCHS))
                finally:
                    lane.close()
    except LaneFailed as failed:
        yield Row(section, name, note=str(failed))
        return
    plain = statistics.median(seconds[KERAS])
    for name, of_rounds in seconds.items():
        value = statistics.median(of_rounds)
        limit = LIMIT if name == WHERE_IT_PAYS else None
        yield Row(section, name, value, "s", "" if name == KERAS else KERAS, value / plain, limit)
