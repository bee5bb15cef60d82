"""The `shardcore` command on the real Keras, one device; on ranks: test_scripts.py."""

import json

import keras
import pytest
import torch

from shardcore import cli
from shardcore.testing import run_ranks

MODEL = """
import keras

def build(distribution=True):
    if distribution:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="d")])

def plain():
    return build(False)

def unbuilt():
    return keras.Sequential([keras.layers.Dense(2)])
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "a_model.py").write_text(MODEL)
    return f"{tmp_path}/a_model.py"


def command(*words):
    """The exit code and what the command wrote, from a separate process."""

    def program(rank):
        import contextlib
        import io

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(words)
            except SystemExit as exit_:
                code = exit_.code
        return code, out.getvalue(), err.getvalue()

    return run_ranks(program, 1)[0]


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


def test_verify_prints_the_table(target):
    code, out, _ = command("verify", target)
    assert code == 0
    assert "all as it should be" in out
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
        ("make", 2, "has no function 'make'; it has build, plain, unbuilt: name one"),
    ],
)
def test_what_cannot_be_verified(target, function, code, message):
    found, out, err = command("verify", f"{target}:{function}")
    assert (found, out) == (code, "")
    assert message in err


def test_an_error_of_the_script_keeps_its_traceback(tmp_path):
    (tmp_path / "failing.py").write_text("def build():\n    return {}['key']\n")
    with pytest.raises(
        AssertionError, match=r"failing\.py\", line 2, in build(.|\n)*KeyError: 'ke"
    ):
        command("verify", f"{tmp_path}/failing.py")
