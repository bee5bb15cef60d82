"""The order of layouts by their predicted steps, beside the order by measured ones."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from benchmarks import cases
from benchmarks.cases import Case
from benchmarks.rows import Row
from shardcore.domain.cost.machine import Machine
from shardcore.reporting.cost.ranking import Priced
from shardcore.testing import RankFailed, run_ranks

# Steps in which operators, and not Python, take most of the time.
DECODER = Case(
    "decoder",
    "decoder",
    {"vocabulary": 2048, "width": 256, "blocks": 2, "heads": 8, "length": 128},
    batch=8,
    steps=1,
)
CNN = Case("CNN", "cnn", {"size": 16, "filters": 32, "blocks": 3, "classes": 10}, 64, 1)
WARM_UP = 4
ROUNDS = 8
TIMEOUT = 300.0


def rows(quick: bool, strategy: str) -> Iterator[Row]:
    """Yields measured steps over predicted ones, and rank correlations: of a model, and of all."""
    for ranks in (2,) if quick else (2, 4):
        machine = run_ranks(_machine, ranks, timeout=TIMEOUT)[0]
        of_all: list[tuple[float, float]] = []
        for case in map(cases.quick, (cases.MLP,)) if quick else (cases.MLP, DECODER, CNN):
            section = f"plan, {case.name} over {ranks} ranks"
            predicted = _predicted(case, ranks, machine)
            try:
                measured = run_ranks(_measured, ranks, case, predicted, strategy, timeout=TIMEOUT)
            except RankFailed as failed:
                yield Row(section, "steps", note=str(failed).strip().splitlines()[-1])
                continue
            for each, seconds in zip(predicted, measured[0], strict=True):
                name = f"{each.policy} {each.mesh}"
                ratio = seconds / each.cost.seconds
                yield Row(section, name, seconds, "s", "predicted", ratio)
            pairs = [(each.cost.seconds, s) for each, s in zip(predicted, measured[0], strict=True)]
            yield _all(section, pairs)
            of_all += pairs
        yield _all(f"plan, three models over {ranks} ranks", of_all)


def _all(section: str, pairs: Sequence[tuple[float, float]]) -> Row:
    predicted, measured = zip(*pairs, strict=True)
    found = correlation(predicted, measured)
    note = f"rank correlation of {len(pairs)} layouts: {found:.2f}"
    return Row(section, "all layouts", sum(measured), "s", note=note)


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation.

    Example:
        >>> correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
        0.5
    """
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the place of each value among all; equal ones share their mean place."""
    return [
        sum(other < each for other in values) + sum(other == each for other in values) / 2
        for each in values
    ]


def _machine(_rank: int) -> Machine:
    import shardcore
    from shardcore.bootstrap.cost import machines

    shardcore.install()
    return machines.measure("here")


def _predicted(case: Case, ranks: int, machine: Machine) -> list[Priced]:
    """Returns the candidates; those that have the same rules and mesh differ in nothing."""
    import shardcore

    big = attrs.evolve(machine, memory=1 << 60)
    plan = shardcore.plan(
        lambda: _compiled(case), policy="auto", devices=ranks, batch=case.data(1), machine=big
    )
    return list(plan.ranking.priced)


def _measured(_rank: int, case: Case, predicted: Sequence[Priced], strategy: str) -> list[float]:
    """Returns the median captured step of each candidate.

    A round has one step of each candidate, so that other programs delay all of them alike.
    """
    import keras

    import shardcore

    models, batch = [], case.data(1)
    for each in predicted:
        keras.utils.clear_session()
        shardcore.install(strategy)
        mesh = keras.distribution.DeviceMesh(each.mesh.shape, each.mesh.axis_names)
        shardcore.plan(lambda: _compiled(case), mesh, each.policy, **each.options).distribute()
        models.append((keras.distribution.distribution(), _compiled(case)))
        for _ in range(WARM_UP):
            models[-1][1].train_on_batch(*batch)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS):
        for (distribution, model), found in zip(models, times, strict=True):
            keras.distribution.set_distribution(distribution)
            start = time.perf_counter()
            model.train_on_batch(*batch)
            found.append(time.perf_counter() - start)
    return list(map(statistics.median, times))


def _compiled(case: Case) -> Any:
    import keras

    from benchmarks import models

    model = getattr(models, case.kind)(**case.sizes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(cases.LEARNING_RATE), loss)
    return model
