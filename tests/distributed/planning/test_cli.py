"""The `shardcore` command on the real Keras, one device; on ranks: test_scripts.py."""

import json
import os

import keras
import pytest
import torch

from shardcore import cli
from shardcore.testing import RankFailed, run_ranks
from tests.plugins.packages import write_package

MODEL = """
import keras

def build(distribution=True):
    if distribution:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="d")])

def plain():
    return build(False)

def trained(distribution=True):
    model = build(distribution)
    model.compile("adam", "mse")
    return model

def trained_plain():
    return trained(False)

def ruled():
    mesh = keras.distribution.DeviceMesh((1, keras.distribution.get_device_count()), ("x", "y"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "y")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=rules))
    return trained(False)

def batch():
    return keras.random.normal((8, 3)), keras.random.normal((8, 2))

def unbuilt():
    return keras.Sequential([keras.layers.Dense(2)])
"""

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def target(tmp_path):
    (tmp_path / "a_model.py").write_text(MODEL)
    return f"{tmp_path}/a_model.py"


def command(*words, **environment):
    """The exit code and what the command wrote, from a separate process."""

    def program(rank):
        import contextlib
        import io

        for name in LAUNCHED:
            os.environ.pop(name, None)
        os.environ.update(environment)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(words)
            except SystemExit as exit_:
                code = exit_.code
        return code, out.getvalue(), err.getvalue()

    return run_ranks(program, 1, init=False)[0]


def test_status():
    code, out, _ = command("status", "--strategy", "single")
    assert code == 0
    assert "│ strategy" in out
    assert "│ single " in out
    assert keras.__version__ in out


def test_status_as_data():
    code, out, _ = command("status", "--json")
    data = json.loads(out)
    assert (code, data["strategy"], data["devices"]) == (0, "dtensor", ["cpu:0"])
    assert data["versions"]["keras"] == keras.__version__


def test_no_such_strategy_is_code_1():
    code, out, err = command("status", "--strategy", "dtenser")
    assert (code, out) == (1, "")
    assert err.startswith("shardcore: No strategy 'dtenser'")


def test_a_plan_is_printed_in_one_form(target):
    code, out, err = command("plan", target, "--mesh", "1x2", "--json", "--python")
    assert (code, out) == (2, "")
    assert "--python prints a program: leave out --json and --memory" in err


def test_a_plan_tells_the_memory_of_a_step(target):
    words = ("plan", f"{target}:trained_plain", "--mesh", "2x4", "--memory")
    code, out, _ = command(*words)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "highest in a step" in out
    code, out, _ = command(*words, "--json")
    data = json.loads(out)
    memory = data["memory"]
    assert (code, memory["mesh"]) == (0, "(data=2, model=4)")
    assert data["bytes_here"] <= memory["step"]["variables"] <= memory["kept"]
    assert memory["step_peak"] == sum(memory["step"].values())
    code, out, err = command(*words, **LAUNCHED)
    assert (code, out) == (2, "")
    assert "--memory simulates ranks, but a launcher started this one: leave it out" in err


def test_a_plan_chooses_the_mesh_and_the_policy(target):
    """The model is tiny: every collective costs more than what it saves."""
    words = ("plan", f"{target}:trained_plain", "--devices", "4", "--policy", "auto")
    words = (*words, "--batch", "24", "--host", "2")
    code, out, _ = command(*words)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "predicted steps of 24 rows on h100: 2 devices a host" in out
    code, out, _ = command(*words, "--json")
    ranking = json.loads(out)["ranking"]
    seconds = [each["cost"]["seconds"] for each in ranking["priced"]]
    assert len(seconds) == 2  # the others shard nothing over an axis, or nothing else
    assert seconds == sorted(seconds)
    code, out, err = command(*words, "--memory", "10B")
    assert (code, out) == (1, "")
    assert "No layout fits. 6 layouts: too large for the memory; the smallest is" in err


def test_a_plan_passes_over_the_distribution_that_the_function_sets(target):
    words = ("--mesh", "1x2", "--policy", "fully_sharded", "--axes", "y,x", "--json")
    plans = [command("plan", f"{target}:{each}", *words)[1] for each in ("ruled", "trained_plain")]
    assert plans[0] == plans[1]
    assert json.loads(plans[0])["mesh"] == "(y=1, x=2)"


PRINTS = """
from shardcore.ports.hookspecs import hookimpl
print("a plug-in is imported")

@hookimpl
def shardcore_strategies():
    print("its hook is called")
    return []
"""


def test_only_data_is_on_standard_output(target, tmp_path, monkeypatch):
    write_package(tmp_path, "prints-much", PRINTS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "prints.py").write_text(f"print('the script')\n{MODEL}")
    code, out, err = command("plan", f"{tmp_path}/prints.py", "--mesh", "1x2", "--json")
    assert (code, json.loads(out)["mesh"]) == (0, "(data=1, model=2)")
    for each in ("a plug-in is imported", "its hook is called", "the script"):
        assert each in err


def test_verify_prints_the_table(target):
    code, out, _ = command("verify", target)
    assert code == 0
    assert "as it should be, gradients not checked" in " ".join(out.split())
    assert "sequential/d/kernel" in out


def test_what_is_not_as_it_should_be_is_code_1(target, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda *_: False)  # of a shard and the full tensor
    code, out, _ = command("verify", f"{target}:build")
    assert code == 1
    assert "WRONG" in out


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("plain", 1, r"shardcore: No distribution is set on this thread: call keras.distribution"),
        ("unbuilt", 2, "returned a model that is not built, so it has no variables yet"),
        ("make", 2, "has no function 'make'; it has build, plain, trained, "),
    ],
)
def test_what_cannot_be_verified(target, function, code, message):
    found, out, err = command("verify", f"{target}:{function}")
    assert (found, out) == (code, "")
    assert message in err


def test_an_error_of_the_script_keeps_its_traceback(tmp_path):
    (tmp_path / "failing.py").write_text("def build():\n    return {}['key']\n")
    with pytest.raises(RankFailed, match=r"failing\.py\", line 2, in build(.|\n)*KeyError: 'ke"):
        command("verify", f"{tmp_path}/failing.py")


def test_explain_lays_a_model_out_by_a_policy_over_simulated_ranks(target):
    code, out, _ = command("explain", f"{target}:trained_plain", "--mesh", "2x4")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "policy tensor_parallel, mesh (data=2, model=4)" in out
    assert "strategy dtensor, mesh (data=2, model=4), rank 0" in " ".join(out.split())
    assert "replicated: its output is one of" in out
    assert "summed together over axis 'data'" in out


def test_explain_takes_the_distribution_of_the_script(target):
    words = ("explain", f"{target}:trained", "--ranks", "8", "--strategy", "manual", "--json")
    code, out, _ = command(*words)
    data = json.loads(out)
    assert (code, data["mesh"], data["strategy"]) == (0, "(batch=8)", "manual")
    assert data["calls"] == {"all_reduce": 2}
    (layouts,) = data["layouts"]["rules"]
    assert (layouts["rule"], layouts["reason"]) == ("", "no rule matches: replicated")
    assert layouts["bytes_full"] == (3 * 2 + 2) * 4


def test_explain_names_the_rules_of_the_script(target):
    code, out, _ = command("explain", f"{target}:ruled", "--ranks", "2", "--step", "predict")
    assert code == 0
    assert "layouts of the program, mesh (x=1, y=2)" in out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert [".*kernel", "(None, 'y')", "1", "12 B"] in rows
    assert ["a rule of the program", "", "", ""] in rows
    assert ["(no rule)", "replicated", "1", "8 B"] in rows


def test_explain_saves_the_picture(target, tmp_path):
    words = ("explain", f"{target}:trained", "--ranks", "2", "--save", f"{tmp_path}/step.svg")
    assert command(*words)[0] == 0
    assert "all_reduce" in (tmp_path / "step.svg").read_text()


def test_explain_on_one_device(target):
    code, out, _ = command("explain", f"{target}:trained", "--step", "test")
    assert code == 0
    assert "Nothing is moved between ranks: the mesh is of one device." in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "environment", "code", "message"),
    [
        (["--policy", "auto"], {}, 2, "--policy goes with --mesh: give ranks by axes"),
        (["--ranks", "0"], {}, 2, "--ranks 0 is no number of ranks: give 1 or more"),
        (["--ranks", "2"], LAUNCHED, 2, "but a launcher started this one: leave it out"),
        (["--batch", "data"], {}, 2, "name one that returns the global batch, --batch FUNCTION"),
        (
            ["--step", "fit"],
            {},
            1,
            "one of ('train', 'test', 'predict') for explain(step), got 'fit'",
        ),
        (["--mesh", "2x4"], {}, 2, "trained() sets a distribution, and --mesh lays the model out"),
        (
            ["--ranks", "2", "--save", "a.png"],
            {},
            1,
            '".svg" or ".html" for Explanation.save(path), got \'a.png\'',
        ),
    ],
)
def test_what_cannot_be_explained(target, words, environment, code, message):
    found, out, err = command("explain", f"{target}:trained", *words, **environment)
    assert (found, out) == (code, "")
    assert message in err


def test_an_axis_that_the_mesh_lacks(target):
    words = ("--mesh", "2x4", "--option", "axis=modle")
    code, out, err = command("explain", f"{target}:trained_plain", *words)
    assert (code, out) == (1, "")
    assert "'modle'" in err
    assert err.count("\n") == 1
