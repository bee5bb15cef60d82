"""The cost of many ranks for one: requests to the store, bytes, memory, CPU time."""

import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from benchmarks.rows import Row
from shardcore.testing import run_ranks

REAL = (2, 4, 8, 16)
SIMULATED = (8, 64, 512, 4096)
HOST = 8  # ranks along the axis "model"
LAYERS, WIDTH = 100, 64
VALUE = b"a digest of all layouts, of 64 hexadecimal digits in most cases."
LIMIT = 1.25
ROUNDS = 5  # of a plan
TIMEOUT = 300.0
# The functions of shardcore that look whether another rank has come: the later, the more often.
LOOKS = {"is_complete", "_absent", "find"}
REQUESTS = ("add", "check", "compare_set", "delete_key", "get", "multi_get", "set", "wait")


@frozen
class Measure:
    """A figure that is not to grow with the number of ranks.

    Args:
        title: What is measured.
        ranks: The numbers of ranks.
        unit: Its unit, as in `Row`.
        of: Returns the figure for a number of ranks and a strategy.
        limit: The most that it may grow; None for what has to grow.
    """

    title: str
    ranks: tuple[int, ...]
    unit: str
    of: Callable[[int, str], float]
    limit: float | None = LIMIT


def rows(quick: bool, strategy: str) -> Iterator[Row]:
    """Yields each figure for a growing number of ranks, and its ratio to that of the fewest."""
    for measure in MEASURES:
        first: float | None = None
        for ranks in measure.ranks[:2] if quick else measure.ranks:
            found = measure.of(ranks, strategy)
            first = first or found
            against = f"{measure.ranks[0]} ranks"
            limit = measure.limit if ranks == measure.ranks[-1] else None
            yield Row(
                measure.title,
                f"{ranks} ranks",
                found,
                measure.unit,
                against,
                found / first,
                limit,
            )


def _start(ranks: int, strategy: str) -> float:
    """Returns the requests of the busiest rank but rank 0 up to the end of the first step."""
    _, *others = run_ranks(_started, ranks, strategy, init=False, timeout=TIMEOUT)
    return max(others)


def _started(_rank: int, strategy: str) -> int:
    import keras
    import numpy as np
    import torch.distributed as dist

    import shardcore

    requests = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: object) -> Any:
            nonlocal requests
            caller = sys._getframe(1).f_code
            requests += "shardcore" in caller.co_filename and caller.co_name not in LOOKS
            return original(*args)

        return ask

    for name in REQUESTS:
        setattr(dist.Store, name, counted(getattr(dist.Store, name)))
    shardcore.install(strategy)
    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = _model()
    model.compile("sgd", "mse")
    x = np.ones((len(keras.distribution.list_devices()), WIDTH), "float32")
    model.fit(x, x, verbose=0)
    return requests


def _agreement(ranks: int) -> tuple[int, int]:
    """Returns the requests of a rank in a round of the exchange, and the bytes that it reads."""
    from torch.distributed import HashStore

    from shardcore.adapters.ranks.job.rounds import Round
    from shardcore.adapters.ranks.job.signed_store import SignedStore

    requests = read = 0

    class Counting:
        """A store that counts."""

        def __init__(self, store: HashStore) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def ask(*args: object) -> Any:
                nonlocal requests, read
                found = getattr(self._store, name)(*args)
                requests += name in REQUESTS
                values = found if isinstance(found, list) else [found]
                read += sum(len(each) for each in values if isinstance(each, bytes))
                return found

            return ask

    store = HashStore()
    own = Round.following(0, ranks, SignedStore(Counting(store), b"secret"))
    own.publish(VALUE)
    for rank in range(1, ranks):
        Round.following(rank, ranks, SignedStore(store, b"secret")).publish(VALUE)
    assert own.is_complete()
    own.values()
    return requests, read


def _memory(ranks: int, strategy: str) -> float:
    return run_ranks(_laid_out, 1, ranks, strategy, init=False, timeout=TIMEOUT)[0]


def _laid_out(_rank: int, ranks: int, strategy: str) -> int:
    """Returns the bytes of Python's objects of a distribution and a model."""
    _imported(ranks, strategy)
    gc.collect()
    tracemalloc.start()
    _distribute(ranks)
    model = _model()
    gc.collect()
    found = tracemalloc.get_traced_memory()[0]
    del model
    return found


def _seconds(ranks: int, strategy: str) -> float:
    return run_ranks(_distributed, 1, ranks, strategy, init=False, timeout=TIMEOUT)[0]


def _distributed(_rank: int, ranks: int, strategy: str) -> float:
    """Returns the CPU time to set a distribution."""
    _imported(ranks, strategy)
    begun = time.process_time()
    _distribute(ranks)
    return time.process_time() - begun


def _imported(ranks: int, strategy: str) -> None:
    """Makes this process rank 0 of simulated ranks, with all imported that a distribution needs."""
    import keras

    import shardcore
    from shardcore import bootstrap

    bootstrap.simulate(ranks)
    shardcore.install(strategy)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    keras.distribution.set_distribution(None)
    _model()


def _distribute(ranks: int) -> None:
    import keras

    mesh = keras.distribution.DeviceMesh((ranks // HOST, HOST), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def _plan_seconds(ranks: int, strategy: str) -> float:
    return run_ranks(_planned, 1, ranks, strategy, init=False, timeout=TIMEOUT)[0]


def _planned(_rank: int, ranks: int, strategy: str) -> float:
    import shardcore
    from shardcore.domain.layouts.mesh import Mesh

    shardcore.install(strategy)
    shardcore.plan(_model, Mesh((1, HOST), ("data", "model")))  # imports the planner
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        shardcore.plan(_model, Mesh((ranks // HOST, HOST), ("data", "model")))
        times.append(time.process_time() - begun)
    return statistics.median(times)


def _model() -> Any:
    import keras

    hidden = [keras.layers.Dense(WIDTH) for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden])


MEASURES = (
    Measure("requests to the store up to the first step, without looks", REAL, "requests", _start),
    Measure("requests of an agreement", SIMULATED, "requests", lambda n, _: _agreement(n)[0]),
    Measure("bytes that an agreement reads", SIMULATED, "B", lambda n, _: _agreement(n)[1]),
    Measure("memory of the layouts of 100 layers", SIMULATED, "B", _memory, None),
    Measure("CPU time to set a distribution", SIMULATED, "s", _seconds, None),
    Measure("CPU time of a plan for 100 layers", SIMULATED, "s", _plan_seconds),
)
