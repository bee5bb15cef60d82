"""The project files agree: the workflow, pre-commit and pyproject.toml name what is there."""

import ast
import re
import subprocess
import tomllib

from tests.checks.tree import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
# What one job of the matrix runs is what `make test` runs, beside the job for the site.
IN_TEST = {"lint", "checks", "unit", "distributed", "docs"}


def made_in(text: str) -> set[str]:
    """Returns the targets that the steps of a workflow make."""
    return set(re.findall(r"^ *- run: make ([\w-]+)", text, re.MULTILINE))


def test_the_workflow_runs_targets_of_make_and_nothing_else():
    steps = re.findall(r"^ *- run: (.+)$", WORKFLOW, re.MULTILINE)
    assert [step for step in steps if not step.startswith("make ")] == []
    assert made_in(WORKFLOW) <= TARGETS


def test_the_workflow_runs_all_that_make_test_runs():
    assert made_in(WORKFLOW) >= IN_TEST | {"compat", "hub", "dist"}


def test_the_workflow_has_the_python_versions_that_the_package_names():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    (matrix,) = re.findall(r"^ *python: \[(.*)\]$", WORKFLOW, re.MULTILINE)
    assert re.findall(r"[\d.]+", matrix) == named


def test_pre_commit_runs_commands_of_make_lint():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"^ *entry: \.venv/bin/(.+)$", text, re.MULTILINE)
    assert len(entries) == text.count("- id:")
    commands = re.findall(r"^\t\$\(VENV\)/bin/(.+)$", MAKEFILE, re.MULTILINE)
    assert [e for e in entries if not any(c.startswith(e) for c in commands)] == []


def test_make_help_shows_every_target_and_twelve_first():
    done = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    main, others = (
        set(re.findall(r"^make ([\w-]+)", part, re.MULTILINE)) for part in done.stdout.split("\n\n")
    )
    assert len(main) == 12
    parts_of_others = {"bench-jax", "distributed-dtensor", "distributed-manual", "help"}
    assert main | others == TARGETS - parts_of_others - {"unit-core", "unit-torch"}


def test_a_planted_step_is_seen():
    assert made_in("    - run: make lint\n      - run: make frobnicate X=1\n") == {
        "lint",
        "frobnicate",
    }


def test_each_long_test_that_make_test_leaves_out_is_there():
    folders = (ROOT / "tests", ROOT / "tests" / "distributed")
    for name in tomllib.loads((ROOT / "tests" / "long_tests.toml").read_text()):
        path, *test = name.partition("[")[0].split("::")
        test = [] if len(test) > 1 else test  # the class may inherit it
        (file,) = (folder / path for folder in folders if (folder / path).is_file())
        nodes = ast.walk(ast.parse(file.read_text()))
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert functions.issuperset(test[-1:]), name
