"""A third party's package, installed by pip, brings a strategy that trains."""

import json
import os
import sys

import keras
import pytest

import shardcore
from shardcore import bootstrap
from shardcore.domain.errors import StrategyError
from shardcore.testing import run_ranks
from tests import warm
from tests.plugins.packages import TOY, pip_install, write_package

PROGRAM = """
import json
import numpy as np
import shardcore
shardcore.install(strategy="toy")
import keras
import toy_strategy
keras.distribution.set_distribution(keras.distribution.DataParallel())
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile(keras.optimizers.SGD(0.1), "mse")
before = model.get_weights()[0]
model.train_on_batch(np.ones((4, 3)), np.zeros((4, 2)))
status = shardcore.status()
print(json.dumps({
    "strategy": status.strategy,
    "passed_over": status.passed_over,
    "changed": bool(np.any(model.get_weights()[0] != before)),
    "events": toy_strategy.events,
    "report": str(shardcore.verify(model)),
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder where the package is installed."""
    return pip_install(TOY, tmp_path_factory.mktemp("site"))


def run(site, program, **env):
    path = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(site), *path])
    return warm.run(["-c", program], {**os.environ, "PYTHONPATH": path, **env})


def test_its_strategy_is_taken_by_name_and_trains(site):
    done = run(site, PROGRAM)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["strategy"] == "toy"
    assert result["passed_over"].keys() == {"dtensor", "manual", "single"}
    assert result["changed"]
    # kernel, bias, and what the optimizer and the loss keep
    assert result["events"]["create"] >= 4
    assert result["events"]["assign"] >= 2
    assert result["report"].lstrip().startswith("strategy toy, mesh (batch=1), rank 0: all as it")


def test_auto_passes_it_over_and_says_why(site):
    program = "import shardcore; print(shardcore.install().passed_over['toy'])"
    assert run(site, program).stdout == "chosen only by name.\n"


def test_the_error_gives_the_reason_of_an_unavailable_strategy(site):
    program = "import shardcore; shardcore.install('toy')"
    done = run(site, program, TOY_IS_UNAVAILABLE="no toys here: buy one.")
    assert done.returncode == 1
    assert (
        "StrategyError: Strategy 'toy' cannot be used here: no toys here: buy one." in done.stderr
    )


def test_a_broken_package_is_reported_and_dtensor_is_taken(tmp_path):
    write_package(tmp_path, "broken-strategy", "import a_library_that_is_not_there")

    def program(rank):
        sys.path.insert(0, str(tmp_path))
        with pytest.raises(StrategyError, match=r"No strategy 'broken': .* package 'broken-"):
            shardcore.install("broken")
        shardcore.install("dtensor")
        return shardcore.status().passed_over["broken-strategy"]

    (reason,) = run_ranks(program, 1)
    assert reason.startswith("the import of its plug-in 'broken_strategy' failed: ModuleNotFound")


BREAKS = """
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import StrategyEntry
from shardcore.strategies.single_device import SingleDeviceStrategy


class Halves(SingleDeviceStrategy):
    def create(self, value, storage, variable):
        return value[: len(value) // 2]


class Lacks:
    def __init__(self, world):
        pass


@hookimpl
def shardcore_strategies():
    return [StrategyEntry(k.__name__.lower(), "An example.", k) for k in (Halves, Lacks)]
"""


def test_a_package_that_breaks_the_contract_is_named_where_it_does(tmp_path):
    write_package(tmp_path, "careless-strategies", BREAKS)

    def program(rank):
        sys.path.insert(0, str(tmp_path))
        shardcore.install("lacks")
        who = "Strategy 'lacks' of package 'careless-strategies'"
        with pytest.raises(StrategyError, match=rf"^{who} breaks .*: Lacks has no method storage"):
            keras.distribution.set_distribution(keras.distribution.DataParallel())
        assert keras.distribution.distribution() is None
        shardcore.uninstall()
        shardcore.install("halves")
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        who = "Strategy 'halves' of package 'careless-strategies'"
        with pytest.raises(StrategyError, match=rf"^{who} .* \(1,\) for variable 'v': .* \(3,\)"):
            keras.Variable([1.0, 2.0, 3.0], name="v")
        shardcore.uninstall()
        shardcore.install("dtensor")  # and it breaks no other
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        return keras.Variable([1.0, 2.0, 3.0], name="v").numpy().tolist()

    assert run_ranks(program, 1) == [[1.0, 2.0, 3.0]]


def test_a_package_that_claims_dtensor_is_named_and_dtensor_is_ours(tmp_path):
    source = (TOY / "toy_strategy.py").read_text().replace('"toy"', '"dtensor"')
    write_package(tmp_path, "greedy-strategy", source)

    def program(rank):
        sys.path.insert(0, str(tmp_path))
        passed_over = shardcore.install("dtensor").passed_over
        return passed_over["greedy-strategy"], bootstrap.installation().entry.package

    (reason, package) = run_ranks(program, 1)[0]
    assert reason.startswith("strategy 'dtensor' is offered by package 'shardcore' and by package")
    assert package == "shardcore"
