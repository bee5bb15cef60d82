"""The documents are true: their code runs, and what they list is all there is.

docs/reference/rules.md and docs/reference/transitions.md are held to the core by its unit tests.
"""

import os
import re
from pathlib import Path

import attrs
import pytest

import shardcore
from shardcore.cli import arguments
from shardcore.ports import hookspecs
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry
from tests import warm
from tests.checks.tree import python
from tests.plugins.packages import write_package

DOCS = Path(__file__).parents[3] / "docs"
PACKAGE = Path(shardcore.__file__).parent
ERROR = r"^class (\w+)\((?:Exception|\w*Error)(?:, \w+)?\):"


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
    assert run("\n".join(python_blocks("how-to/training.md")), tmp_path) == "True\n"


# The test that runs the code of a page, where it is another than those below.
RUN_ELSEWHERE = {
    "how-to/install.md": "above",
    "how-to/training.md": "above",
    "how-to/plugins.md": "below",
    "how-to/policies.md": "test_plan.py",
    "how-to/torch-modules.md": "test_torch_modules.py",
    "reference/rules.md": "tests/unit/domain/paths/test_paths.py",
    "reference/transitions.md": "tests/unit/domain/redistribution/test_redistribution.py",
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


def test_install_names_every_function():
    page = text("how-to/install.md")
    assert [name for name in shardcore.__all__ if f"{name}(" not in page] == []


def test_every_environment_variable_has_a_row():
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    settings = set(re.findall(r"\"((?:SHARDCORE|KERAS_DISTRIBUTION)_[A-Z_]*[A-Z])\"", source))
    assert "SHARDCORE_LOG" in settings
    rows = re.findall(r"^\| (`.*?`) \|", text("reference/environment.md"), re.MULTILINE)
    assert settings <= set(re.findall(r"`(\w+)`", "".join(rows)))


def test_every_error_has_a_row_with_its_class():
    names = {
        name for path in PACKAGE.rglob("*.py") for name in re.findall(ERROR, path.read_text(), re.M)
    }
    rows = re.findall(r"^\| `(\w+)` \|", text("reference/errors.md"), re.MULTILINE)
    assert {"ShardcoreError", "MeshError", "RankFailed"} <= names
    assert set(rows) == names


def test_every_command_and_option_has_a_row():
    page = text("reference/cli.md")
    commands = arguments.parser()
    (groups,) = (action for action in commands._actions if action.choices)
    for name, command in groups.choices.items():
        assert f"| `shardcore {name}" in page
        options = [word for action in command._actions for word in action.option_strings]
        assert [word for word in options if word.startswith("--") and f"`{word}" not in page] == []


def test_the_glossary_is_short_and_sorted():
    terms = re.findall(
        r"^\| (?!term)([a-z][\w -]*) \|", text("reference/glossary.md"), re.MULTILINE
    )
    assert terms == sorted(terms)
    assert 30 < len(terms) <= 40


def test_the_site_shows_every_public_function():
    page = text("reference/api.md")
    assert [name for name in shardcore.__all__ if f".{name}\n" not in page] == ["ShardcoreError"]


@pytest.mark.parametrize("record", sorted(path.name for path in DOCS.glob("explanation/adr/*.md")))
def test_a_decision_has_context_choice_and_consequences(record):
    parts = re.findall(r"^\*\*(\w+)\.\*\*", text(f"explanation/adr/{record}"), re.MULTILINE)
    assert parts == ["Context", "Choice", "Consequences"]
    assert text(f"explanation/adr/{record}").startswith(f"# {int(record[:4])}. ")
