"""The pages list all there is, and each thing that they name is there."""

import re

import attrs
import pytest

import shardcore
import shardcore.domain.errors
from benchmarks import picture
from shardcore import builtin_plugins, domain, errors
from shardcore.cli import arguments
from shardcore.ports import hookspecs
from shardcore.ports.policy import PolicyEntry
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry
from tests import folders, pure_modules, subjects
from tests.checks.tree import ROOT
from tests.loggers import page as page_of_callbacks

DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "shardcore"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
ERROR = r"^class (\w+)\((?:ShardcoreError|PolicyError)(?:, \w+)?\):"
VARIABLE = r"\b((?:SHARDCORE|KERAS_DISTRIBUTION)_[A-Z_]*[A-Z])\b"


def text(name):
    return (DOCS / name).read_text()


def test_plugins_names_every_hook_method_and_field():
    hooks = [name for name in vars(hookspecs) if name.startswith("shardcore_")]
    methods = [name for name in dir(Strategy) if not name.startswith("_")]
    fields = [field.name for kind in (StrategyEntry, NewVariable) for field in attrs.fields(kind)]
    assert hooks
    assert "implicit_replication" in methods
    page = text("how-to/plugins.md")
    missing = [name for name in hooks if f"`{name}`" not in page]
    missing += [name for name in methods if f"| `{name}(" not in page]
    missing += [name for name in fields if f"| `{name}` |" not in page]
    assert missing == []


def test_policies_names_every_policy_and_field():
    page = text("how-to/policies.md")
    names = [entry.name for entry in builtin_plugins.shardcore_policies()]
    fields = [field.name for field in attrs.fields(PolicyEntry)]
    assert [name for name in [*names, *fields] if f"\n| `{name}` |" not in page] == []


def test_install_names_every_function():
    page = text("how-to/install.md")
    assert [name for name in shardcore.__all__ if f"{name}(" not in page] == []


def test_every_environment_variable_has_a_row():
    folders = [folder.rglob("*.py") for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks")]
    files = [
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
        *(each for found in folders for each in found),
    ]
    settings = {name for file in files for name in re.findall(VARIABLE, file.read_text())}
    assert {"SHARDCORE_LOG", "SHARDCORE_COMPAT"} <= settings
    rows = re.findall(r"^\| (`.*?`) \|", text("reference/environment.md"), re.MULTILINE)
    assert settings == set(re.findall(VARIABLE, "".join(rows)))


def test_every_error_has_a_row_with_its_class():
    names = {
        name for path in PACKAGE.rglob("*.py") for name in re.findall(ERROR, path.read_text(), re.M)
    }
    rows = re.findall(r"^\| `(\w+)` \|", text("reference/errors.md"), re.MULTILINE)
    assert {"MeshError", "RankFailed", "UsageError"} <= names
    assert set(rows) == {"ShardcoreError", *names}


def test_the_errors_that_users_catch_are_in_one_module():
    kinds = {name: kind for name, kind in vars(domain.errors).items() if isinstance(kind, type)}
    raised = {name for name, kind in kinds.items() if issubclass(kind, shardcore.ShardcoreError)}
    assert set(errors.__all__) == raised
    assert all(getattr(errors, name) is kinds[name] for name in raised)


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


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 105
    assert [line for line in lines if len(line) > 120] == []


def test_the_picture_of_the_readme_shows_its_results():
    rows = picture.results(README)
    assert len(rows) == 5
    assert all(seconds[0] and seconds[2] for seconds in rows.values())
    assert picture.PICTURE.read_text() == picture.svg(rows), "run python -m benchmarks.picture"


def test_the_script_of_the_readme_has_fifteen_lines():
    (script,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len([line for line in script.splitlines() if line]) == 15


def test_every_make_command_is_in_the_makefile():
    commands = set(re.findall(r"`make (\w+)`", README))
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands == {"demo", "test"}
    assert commands <= targets


def test_every_link_leads_to_a_file():
    for file in (*PAGES, *(ROOT / "docs").glob("**/*.md")):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
        missing = [link for link in links if not (file.parent / link).exists()]
        assert missing == [], f"{file} links to {missing}"


def test_contributing_names_files_and_targets_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:src|tests|docs|examples)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    assert [
        name for name in re.findall(r"`make ([\w-]+)`", text) if f"\n{name}:" not in makefile
    ] == []


def test_the_page_on_captured_steps_has_the_pure_modules():
    assert pure_modules.PAGE.read_text() == pure_modules.page()


def test_contributing_has_every_folder_of_tests_on_ranks():
    """`python -m tests.folders` writes the table."""
    there = {path.parent.name for path in folders.FOLDER.glob("*/test_*.py")}
    assert there == set(folders.SUBJECTS)
    page = folders.PAGE.read_text()
    assert [line for line in folders.table() if line not in page] == []


def test_the_page_of_callbacks_has_the_results_that_are_kept():
    """`make loggers` runs the tests, and writes the table."""
    assert page_of_callbacks.is_up_to_date()
    assert {row["of"][0] for row in page_of_callbacks.kept()} == page_of_callbacks.PACKAGES.keys()


def test_the_design_has_the_folders_of_each_subject():
    """`python -m tests.subjects` writes the table."""
    page = subjects.PAGE.read_text()
    assert [line for line in subjects.table() if line not in page] == []
