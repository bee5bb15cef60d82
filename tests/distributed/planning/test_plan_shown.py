"""A plan is edited, printed and kept as a program, also by the command."""

import contextlib
import io
import json
import os
import re

import keras
import pytest
from keras import layers

import shardcore
from shardcore import bootstrap, cli
from shardcore.domain.errors import LayoutError
from shardcore.testing import run_ranks
from tests import warm
from tests.checks.tree import ROOT
from tests.distributed.planning.planned import build, in_a_process, plan, use
from tests.distributed.programs import is_seed
from tests.plugins.packages import write_package


def test_an_edited_plan_is_what_the_table_shows_and_what_is_stored():
    def program(rank):
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        edited = plan(build, mesh)
        before = edited.report().bytes_here
        edited["sequential/dense_1/bias"] = ("model",)
        del edited["sequential/dense/bias"]
        model = use(edited, build)
        report = shardcore.verify(model)
        rows = {rule.rule: rule for rule in edited.report().rules}
        here = {each.path: each.bytes_here for each in report.variables}
        planned = [v.path for v in model.variables if not is_seed(v.path)]
        assert sum(map(here.get, planned)) == edited.report().bytes_here
        assert edited.report().bytes_here == before - 4 * 4 + 16 * 4
        assert rows["sequential/dense_1/bias"].reason == "edited"
        assert rows[""].reason == "no rule matches: replicated"
        return here["sequential/dense_1/bias"], here["sequential/dense/bias"]

    assert run_ranks(program, 2) == [(16, 128)] * 2


@pytest.mark.parametrize("is_installed", [True, False])
def test_editing_keeps_the_plan_readable(is_installed):
    def program():
        if is_installed:
            shardcore.install()
        edited = plan()
        key = "sequential/dense/kernel"
        edited[key] = ("model", None)
        assert tuple(edited[key].axes) == ("model", None)
        with pytest.raises(ValueError, match="nowhere"):
            edited[key] = ("nowhere", None)
        assert tuple(edited[key].axes) == ("model", None)
        edited[key] = ("model",)
        with pytest.raises(LayoutError, match=f"Rule '{key}' for variable '{key}'"):
            print(edited)
        edited[key] = (None, "model")  # what the policy chose
        return {rule.rule: rule.reason for rule in edited.report().rules}

    assert in_a_process(program)["sequential/dense/kernel"].startswith("columns: dense_1 sums up")


def test_it_prints_and_the_program_that_it_gives_makes_the_same_map():
    def twice():
        x = keras.Input((8,))
        return keras.Model(
            x, [layers.Dense(8, name=f"branch_{n}")(layers.Dense(32, "relu", name=f"up_{n}")(x))
                for n in range(2)],
        )  # fmt: skip

    def program():
        made = plan(twice)
        names = {}
        shardcore.install()
        bootstrap.simulate(8)
        exec(made.to_python(), names)
        assert keras.distribution.distribution()._layout_map is names["layout_map"]
        kept = names["layout_map"]
        assert type(kept) is keras.distribution.LayoutMap
        assert {k: v.axes for k, v in kept.items()} == {k: v.axes for k, v in made.items()}
        # One axis is no tuple: Keras 3.13 and 3.14 look up a name.
        assert keras.distribution.distribution().batch_dim_name == made.batch_dim_name == "data"
        return str(made), repr(made), made.to_python()

    shown, short, source = in_a_process(program)
    assert r"up_\d+/kernel" in shown
    assert "policy tensor_parallel, mesh (data=2, model=4)" in shown
    assert short == "<Plan by policy 'tensor_parallel' over mesh (data=2, model=4): 4 rules>"
    assert r"""layout_map[r"up_\d+/kernel"] = (None, 'model')  # columns: branch_0""" in source


SCRIPT = """
import keras

def build():
    layers = [keras.layers.Dense(n, name=f"d{n}") for n in (64, 8)]
    return keras.Sequential([keras.Input((8,)), *layers])

def sharded():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return build()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "a_model.py").write_text(SCRIPT)
    return f"{tmp_path}/a_model.py"


def command(*words):
    """The exit code and what the command wrote, from a separate process."""

    def program():
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(["plan", *words])
            except SystemExit as exit_:
                code = exit_.code
        return code, out.getvalue(), err.getvalue()

    return in_a_process(program)


def test_the_command_prints_a_plan_for_devices_that_are_not_here(script):
    code, out, _ = command(script, "--mesh", "2x4", "--option", "small=0")
    assert code == 0
    assert "mesh (data=2, model=4)" in out
    words = re.sub(r"[^\w:()]+", " ", out)  # a cell has several lines in a narrow terminal
    assert "columns: d8 sums up (by graph)" in words


def test_the_command_gives_data_or_a_program(script):
    words = (script, "--mesh", "8", "--policy", "fully_sharded", "--option", "small=0")
    code, out, _ = command(*words, "--json")
    assert (code, json.loads(out)["mesh"]) == (0, "(data=8)")
    assert json.loads(out)["rules"][0]["spec"] == "(None, 'data')"
    code, out, _ = command(*words, "--axes", "batch", "--python")
    assert "layout_map['sequential/d64/kernel'] = (None, 'batch')  # dim 1 sharded" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh", "8"), "shardcore: Policy 'tensor_parallel' needs an axis beside"),
        (("--mesh", "2x4", "--policy", "tensor"), "shardcore: No policy 'tensor': there are 'data"),
        (("--mesh", "2x4", "--option", "smal=0"), "has no option 'smal'; it has axis, small"),
    ],
)
def test_the_command_says_in_a_line_what_it_cannot_plan(script, words, message):
    code, out, err = command(script, *words)
    assert (code, out) == (1, "")
    assert message in err


def test_the_code_of_the_document_runs(tmp_path):
    page = (ROOT / "docs" / "how-to" / "policies.md").read_text()
    *programs, policy = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    write_package(tmp_path, "table-policy", policy)
    # The same search over fewer layouts: two devices have 3 for a batch of one row, 16 have 18.
    (searched,) = (n for n, code in enumerate(programs) if "devices=16" in code)
    for large, small in (("devices=16", "devices=2"), ("np.ones((8,", "np.ones((1,")):
        assert large in programs[searched]
        programs[searched] = programs[searched].replace(large, small)
    use = """
def words():
    return keras.Sequential([keras.Input((8,), dtype="int32"), layers.Embedding(64, 8, name="e")])

plan = shardcore.plan(words, Mesh((2, 4), ("data", "model")), "tables")
print(plan["sequential/e/embeddings"].axes)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = warm.run(["-c", "\n".join([*programs, use])], environment, tmp_path)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "policy tensor_parallel, mesh (data=2, model=4)" in shown
    assert "layout_map['up/bias'] = (None,)  # edited" in shown
    assert shown.endswith("(None, 'model')\n")
