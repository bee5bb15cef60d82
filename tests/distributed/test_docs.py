"""The documents are true: their code runs, and what they list is all there is.

docs/reference/rules.md and docs/reference/transitions.md are held to the core by its unit tests.
"""

import os
import re
from pathlib import Path

import attrs
import pytest

import shardcore
from shardcore.ports import hookspecs
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry
from tests.checks.tree import python
from tests.plugins.packages import write_package

DOCS = Path(__file__).parents[2] / "docs"


def text(name):
    return (DOCS / name).read_text()


def python_blocks(name):
    return re.findall(r"^```python\n(.*?)^```$", text(name), re.MULTILINE | re.DOTALL)


def run(source, folder):
    """Runs a program in `folder`, alone, with no backend chosen; gives what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return python("-c", source, cwd=folder, **{**environment, "PYTHONPATH": str(folder)})


def test_the_code_of_install_runs(tmp_path):
    assert run("\n".join(python_blocks("how-to/install.md")), tmp_path) == "dtensor\n"


def test_the_code_of_training_runs(tmp_path):
    assert run("\n".join(python_blocks("how-to/training.md")), tmp_path) == "True\n"


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


def test_plugins_names_every_hook_method_and_field():
    hooks = [name for name in vars(hookspecs) if name.startswith("shardcore_")]
    methods = [name for name in dir(Strategy) if not name.startswith("_")]
    fields = [field.name for kind in (StrategyEntry, NewVariable) for field in attrs.fields(kind)]
    assert hooks
    assert "scope" in methods
    page = text("how-to/plugins.md")
    missing = [name for name in hooks if f"`{name}`" not in page]
    missing += [name for name in methods if f"| `{name}(" not in page]
    missing += [name for name in fields if f"| `{name}` |" not in page]
    assert missing == []


def test_install_names_every_function_and_setting():
    page = text("how-to/install.md")
    assert [name for name in shardcore.__all__ if f"{name}(" not in page] == []
    source = "".join(path.read_text() for path in Path(shardcore.__file__).parent.rglob("*.py"))
    settings = set(re.findall(r"\"((?:SHARDCORE|KERAS_DISTRIBUTION)_[A-Z_]*[A-Z])\"", source))
    assert "SHARDCORE_LOG" in settings
    assert [name for name in sorted(settings) if f"`{name}" not in page] == []


@pytest.mark.parametrize("record", sorted(path.name for path in DOCS.glob("explanation/adr/*.md")))
def test_a_decision_has_context_choice_and_consequences(record):
    parts = re.findall(r"^\*\*(\w+)\.\*\*", text(f"explanation/adr/{record}"), re.MULTILINE)
    assert parts == ["Context", "Choice", "Consequences"]
    assert text(f"explanation/adr/{record}").startswith(f"# {int(record[:4])}. ")
