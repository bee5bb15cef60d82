"""The command line as far as it goes without torch: words, files, functions, exit codes."""

import subprocess
import sys

import pytest

import shardcore
from shardcore import cli
from shardcore.bootstrap import plugins
from tests.plugins.packages import write_package


def exits(capsys, *words):
    """The exit code, and what was written to standard error."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    return exit_.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("status",),
        ("plan",),
        ("explain",),
        ("verify",),
        ("checkpoint",),
        ("checkpoint", "convert"),
    ],
)
def test_help_fits_80_columns(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_names_every_strategy_and_policy(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0] for line in lines if line.startswith("  ") and line.split()}
    loaded = plugins.load()
    assert loaded.strategies.entries.keys() | loaded.policies.entries.keys() <= named


PLUGIN = """
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.policy import PolicyEntry
from shardcore.ports.strategy import StrategyEntry

@hookimpl
def shardcore_strategies():
    return [StrategyEntry("far", "Stores variables elsewhere.", open=lambda world: None)]

@hookimpl
def shardcore_policies():
    return [PolicyEntry("odd", "Shards every other layer.", lambda model, mesh: {})]
"""


def test_help_names_what_packages_offer(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_package(tmp_path, "far-and-odd", PLUGIN)
    shown = {}
    for words in ((), ("verify",), ("plan",)):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        shown[words] = " ".join(capsys.readouterr().out.split())
    del sys.modules["far_and_odd"]
    assert "far Stores variables elsewhere." in shown[()]
    assert "odd Shards every other layer." in shown[()]
    assert "auto (default), dtensor, manual, single, far" in shown["verify",]
    assert "per_layer, odd (default: tensor_parallel)" in shown["plan",]


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"shardcore {shardcore.__version__}\n"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["verify", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "torchrun --nproc_per_node=2 --module shardcore verify model.py:build" in shown
    assert "def build():" in shown
    assert "exit code" in shown


@pytest.mark.parametrize("words", [(), ("verify",), ("explain",), ("status", "extra")])
def test_wrong_words(capsys, words):
    code, error = exits(capsys, *words)
    assert code == 2
    assert "usage: shardcore" in error


def test_no_such_file(capsys, tmp_path):
    code, error = exits(capsys, "verify", f"{tmp_path}/model.py:build")
    assert code == 2
    assert error == (
        f"shardcore: error: there is no file '{tmp_path}/model.py': give FILE[:FUNCTION], such as "
        "model.py:build\n"
    )


@pytest.mark.parametrize("name", ["", "2nd", "a.b"])
def test_no_function_s_name(capsys, tmp_path, name):
    (tmp_path / "model.py").touch()
    code, error = exits(capsys, "verify", f"{tmp_path}/model.py:{name}")
    assert code == 2
    assert f"{name!r} in '{tmp_path}/model.py:{name}' is no function's name" in error


@pytest.mark.parametrize(("suffix", "name"), [("", "build"), (":make", "make")])
def test_the_function_is_build_by_default(tmp_path, suffix, name):
    file = tmp_path / "model.py"
    file.touch()
    assert cli.parse_target(f"{file}{suffix}") == (file, name)


def test_a_file_that_is_no_python(tmp_path):
    (tmp_path / "model.txt").touch()
    with pytest.raises(cli.UsageError, match=r"should end in \.py"):
        cli.load_script(tmp_path / "model.txt")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script that imports its neighbour, as `python script.py` may."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_neighbour.py").write_text("answer = 42\n")
    file = tmp_path / "cli_script.py"
    file.write_text(
        "import os, cli_neighbour\n"
        "def give_number(): return cli_neighbour.answer\n"
        "if __name__ == '__main__': raise SystemExit('run as a script')\n"
    )
    yield file
    for name in ("cli_neighbour", "cli_script"):
        del sys.modules[name]


def test_a_script_is_run_with_its_folder_on_the_path(script):
    module = cli.load_script(script)
    assert cli.function_of(module, "give_number")() == 42
    assert sys.modules["cli_script"] is module


def test_no_such_function_lists_those_there_are(script):
    with pytest.raises(cli.UsageError, match="has no function 'build'; it has give_number:"):
        cli.build_model(cli.load_script(script), "build")


def test_a_function_that_returns_no_model(script):
    with pytest.raises(cli.UsageError, match=r"give_number\(\) .* returned int, expected a keras"):
        cli.build_model(cli.load_script(script), "give_number")


def test_an_environment_that_cannot_is_one_line_and_code_1(capsys, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    code, error = exits(capsys, "status")
    assert code == 1
    assert error.startswith(
        "shardcore: shardcore is for Keras on PyTorch, but the backend is 'jax'"
    )
    assert error.count("\n") == 1


def test_help_loads_no_framework():
    program = (
        "import sys\nfrom shardcore.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print('loaded', *sorted({'torch', 'keras', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "loaded"


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ("8", None, "(data=8)"),
        ("2x4", None, "(data=2, model=4)"),
        ("2x2x2", "a,b,c", "(a=2, b=2, c=2)"),
    ],
)
def test_a_mesh(shape, names, expected):
    assert str(cli.parse_mesh(shape, names)) == expected


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--mesh", "2by4"], 2, "--mesh '2by4' is no mesh: give ranks by axes, such as 8 or 2x4"),
        (["--mesh", "0x4"], 1, "has size 0"),
        (["--mesh", "2x2x2x2"], 1, "has 4 axes but axis_names () has 0"),
        (["--mesh", "2", "--option", "small"], 2, "'small' is none: give NAME=VALUE"),
        ([], 2, "--mesh"),
        (["--mesh", "2", "--devices", "2"], 2, "not allowed with argument"),
        (["--mesh", "2", "--policy", "auto"], 2, "--policy auto goes with --devices N"),
        (["--devices", "2"], 2, "--policy auto goes with --devices N"),
        (["--mesh", "2", "--host", "8"], 2, "--host is for --policy auto"),
        (["--mesh", "2", "--memory", "80GB"], 2, "--memory 80GB is for --policy auto"),
        (["--devices", "2", "--policy", "auto", "--memory"], 2, "memory without a size is not for"),
        (["--devices", "2", "--policy", "auto", "--option", "small=0"], 2, "--option is not for"),
    ],
)
def test_a_plan_that_is_asked_for_wrongly(capsys, tmp_path, words, code, message):
    (tmp_path / "model.py").touch()
    found, error = exits(capsys, "plan", f"{tmp_path}/model.py", *words)
    assert found == code
    assert message in error


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--mesh", "2by4"], 2, "--mesh '2by4' is no mesh: give ranks by axes, such as 8 or 2x4"),
        (["--mesh", "2x4", "--axes", "data"], 1, "has 2 axes but axis_names ('data',) has 1"),
        (["--mesh", "2x4", "--ranks", "8"], 2, "argument --ranks: not allowed with argument --me"),
        (["--option", "small"], 2, "'small' is none: give NAME=VALUE"),
    ],
)
def test_an_explanation_that_is_asked_for_wrongly(capsys, tmp_path, words, code, message):
    (tmp_path / "model.py").touch()
    found, error = exits(capsys, "explain", f"{tmp_path}/model.py", *words)
    assert found == code
    assert message in error


@pytest.mark.parametrize(
    "command", ["", "status", "plan", "explain", "verify", "measure", "checkpoint"]
)
def test_the_help_fits_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
