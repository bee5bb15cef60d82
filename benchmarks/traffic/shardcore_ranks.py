"""Trains cases under shardcore on two gloo ranks, and counts what a rank sends in one step.

A step is counted when it has been captured: shardcore runs the first steps eagerly and records two
of them, and a captured step calls no layer. The eager step is counted in a second build.
"""

import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from attrs import define, field

import shardcore
from benchmarks.traffic import models
from benchmarks.traffic.answers import Counted, Found, answer, failure
from benchmarks.traffic.models import RANKS, Mesh
from shardcore.testing import count_collectives
from tests.matrix.forks import Ended, run_all

MOST_STEPS = 24  # until a step is captured: a loss scale has it recorded in each way that it goes
LOGGER = "shardcore.capture"
LAYER_CALLED = "benchmarks.layer_called"


@define
class _Watch:
    """Counts calls of layers, and keeps what shardcore says of steps that it cannot capture."""

    layer_calls: int = 0
    reasons: list[str] = field(factory=list)


def run(strategy: str, mesh: Mesh, cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Train each case on two ranks; give what its captured and its eager step send, by case.

    Ranks are forked from this process. A case that ends or hangs its ranks costs itself alone.
    """

    def start(rank: int) -> Callable[[Any], Found]:
        progress = sys.stderr
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the rank lives
        shardcore.install(strategy)
        watch = _watch()
        done = itertools.count(1)

        def one(case: Any) -> Found:
            if rank == 0:
                print(f"\r\033[K{strategy}, {mesh.name}: {next(done)} of {len(cases)} {case.name}",
                      end="", file=progress, flush=True)  # fmt: skip
            return _measure(case, mesh, watch)

        return one

    found = run_all(dict(cases), RANKS, start, lambda each: bool(each.failure))
    return {
        name: failure(_last_line(ranks.why)) if isinstance(ranks, Ended) else answer(ranks)
        for name, ranks in found.items()
    }


def _measure(case: Any, mesh: Mesh, watch: _Watch) -> Found:
    watch.reasons.clear()
    try:
        captured = _captured_step(case, mesh, watch)
        eager = _eager_step(case, mesh)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its outcome
        return Found(failure=f"{type(error).__name__}: {error}")
    finally:
        keras.distribution.set_distribution(None)
    return Found(captured, eager, "; ".join(dict.fromkeys(watch.reasons)))


def _captured_step(case: Any, mesh: Mesh, watch: _Watch) -> Counted | None:
    """Train until a step is captured, and count the next one that is."""
    model, batches = models.build(case, mesh), models.batches(case)
    calls_no_layer = False
    for batch in itertools.islice(batches, MOST_STEPS):
        watch.layer_calls = 0
        if calls_no_layer:
            counted = _count(model, batch)
            if not watch.layer_calls:
                return counted
        else:
            model.train_on_batch(*batch)
        calls_no_layer = not watch.layer_calls
    return None


def _eager_step(case: Any, mesh: Mesh) -> Counted:
    """Count the second eager step: the ranks compare each other in the first."""
    model, batches = models.build(case, mesh), models.batches(case)
    model.run_eagerly = True
    model.train_on_batch(*next(batches))
    return _count(model, next(batches))


def _count(model: Any, batch: Sequence[Any]) -> Counted:
    with count_collectives() as traffic:
        model.train_on_batch(*batch)
    return Counted(dict(traffic.calls), dict(traffic.operand_bytes))


def _last_line(report: str) -> str:
    return report.strip().splitlines()[-1]


class _Original:
    call: Callable[..., Any]


def _announced(layer: Any, *args: Any, **kwargs: Any) -> Any:
    # The interpreter counts: a step that changed a variable of Python would not be captured.
    sys.audit(LAYER_CALLED)
    return _Original.call(layer, *args, **kwargs)


def _watch() -> _Watch:
    watch = _Watch()

    def count(event: str, _: Any) -> None:
        watch.layer_calls += event == LAYER_CALLED

    sys.addaudithook(count)
    _Original.call, keras.Layer.__call__ = keras.Layer.__call__, _announced
    logger = logging.getLogger(LOGGER)
    logger.addHandler(_Reasons(watch))
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    return watch


class _Reasons(logging.Handler):
    """Keeps the warnings of shardcore about steps that run eagerly."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        _, _, reason = text.partition("with the same numbers: ")
        self._watch.reasons.append((reason or text).partition(". To silence this")[0])
