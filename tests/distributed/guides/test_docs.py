"""The code of the pages runs.

The unit tests of the core run that of docs/reference/rules.md and docs/reference/transitions.md.
"""

import os
import re
from pathlib import Path

import pytest

from tests import warm
from tests.checks.tree import python
from tests.plugins.packages import write_package

DOCS = Path(__file__).parents[3] / "docs"


def text(name):
    return (DOCS / name).read_text()


def python_blocks(name):
    return re.findall(r"^```python\n(.*?)^```$", text(name), re.MULTILINE | re.DOTALL)


def environment(folder):
    inherited = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return {**inherited, "PYTHONPATH": str(folder)}


def run(source, folder):
    """Runs a program in `folder`, alone; gives what it printed."""
    done = warm.run(["-c", source], environment(folder), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_code_of_install_runs_in_a_new_interpreter(tmp_path):
    source = "\n".join(python_blocks("how-to/install.md"))
    assert python("-c", source, cwd=tmp_path, **environment(tmp_path)) == "dtensor\n"


def test_the_code_of_training_runs(tmp_path):
    assert (
        run("\n".join(python_blocks("how-to/training.md")), tmp_path)
        == "True\n(1003, 16) (16, 1003)\n"
    )


# The test that runs the code of a page, where it is another than those below.
RUN_ELSEWHERE = {
    "how-to/install.md": "above",
    "how-to/training.md": "above",
    "how-to/loggers.md": "tests/loggers/test_loggers.py",
    "how-to/plugins.md": "below",
    "how-to/policies.md": "test_plan_shown.py",
    "how-to/torch-modules.md": "test_parallelize.py",
    "reference/rules.md": "tests/unit/domain/layouts/test_path_rules.py",
    "reference/transitions.md": "tests/unit/domain/engine/test_transitions.py",
}
PAGES = sorted(
    name
    for name in (str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    if python_blocks(name) and name not in RUN_ELSEWHERE
)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_every_other_page_runs(page, tmp_path):
    run("\n".join(python_blocks(page)), tmp_path)


PROGRAM = """
import shardcore
shardcore.install(strategy="whole")
import keras
keras.utils.set_random_seed(1)
if {distributed}:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
x = keras.random.uniform((16, 4), seed=1)
history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
print(shardcore.status().strategy, shardcore.status().mesh_shape, history.history["loss"])
"""


def test_the_strategy_of_plugins_is_a_strategy(tmp_path):
    module = python_blocks("how-to/plugins.md")[0]
    write_package(tmp_path, "whole-strategy", module)
    plain = run(PROGRAM.format(distributed=False), tmp_path)
    distributed = run(PROGRAM.format(distributed=True), tmp_path)
    assert plain.startswith("whole None [")
    assert distributed == plain.replace("None", "(1,)")


def test_the_test_of_plugins_is_the_contract_of_a_strategy():
    (test,) = (block for block in python_blocks("how-to/plugins.md") if "TestMine" in block)
    names = {}
    exec(test, names)
    assert issubclass(names["TestMine"], names["StrategyContract"])
    assert (names["TestMine"].strategy, names["TestMine"].several_ranks) == ("mine", True)
