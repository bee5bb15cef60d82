"""The tree is read by its names: small folders, files of 25 to 300 lines, pages that name files.

An exception has its reason here.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.tree import ROOT

SOURCE = ROOT / "src" / "shardcore"
MOST_FILES = 15  # of a folder, besides its `__init__`
FEWEST_LINES, MOST_LINES = 25, 300

# Folders of more files, and files of another length, each with the reason.
REASONS = {
    "__main__.py": "`python -m shardcore`",
    "adapters/switches.py": "read by `job` and `capture`, which do not import each other",
    "binding/types.py": "types that all folders of binding share",
}
# The same of tests.
REASONS_OF_TESTS = {
    "distributed/capture/reads/hidden_reads.py": "one table: reads without a name",
    "distributed/capture/states/kinds.py": "one table: kinds of Python state",
    "distributed/capture/states/test_found_states.py": "one list: states that others found",
    "distributed/capture/states/surroundings.py": "one table: settings, files, clocks",
    "matrix/cases/histories.py": "the events of one random history, and what draws them",
    "matrix/cases/layers.py": "one table: a case for each layer",
    "matrix/cases/ops.py": "one table: the calls of each function",
    "matrix/cases/own_parts.py": "cases: layers, optimizers, metrics and losses of users",
    "matrix/cases/own_steps.py": "cases: models of users that override `train_step`",
}
_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
_PACKAGES = "adapters|binding|bootstrap|domain|policies|ports|reporting|strategies"
_FILE = re.compile(rf"\b(?:(?:src/shardcore|tests|benchmarks|examples|{_PACKAGES})/)[\w/-]+\.py\b")


def modules(folder: Path) -> list[Path]:
    """Returns the modules of a folder, without its `__init__` and its folders."""
    return sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")


def folders(root: Path) -> Iterator[Path]:
    yield root
    yield from (path for path in sorted(root.rglob("*")) if (path / "__init__.py").exists())


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


def large_folders(root: Path) -> dict[str, int]:
    """Returns the folders of too many files, with their numbers."""
    found = {folder.relative_to(root).as_posix(): len(modules(folder)) for folder in folders(root)}
    return {name: count for name, count in found.items() if count > MOST_FILES}


def odd_files(root: Path) -> dict[str, int]:
    """Returns the files that are too short or too long, with their lines."""
    files = {file for folder in folders(root) for file in modules(folder)}
    found = {file.relative_to(root).as_posix(): length(file) for file in files}
    return {name: n for name, n in found.items() if not FEWEST_LINES <= n <= MOST_LINES}


def missing_files(text: str) -> list[str]:
    """Returns the files that a page names and that are not there."""
    named = (name for name in _FILE.findall(text))
    return [name for name in named if not ((ROOT / name).exists() or (SOURCE / name).exists())]


def test_each_folder_of_the_package_has_few_files_or_a_reason():
    assert set(large_folders(SOURCE)) <= set(REASONS), large_folders(SOURCE)


def test_each_module_of_the_package_has_a_usual_length_or_a_reason():
    assert set(odd_files(SOURCE)) <= set(REASONS), odd_files(SOURCE)


def test_each_reason_is_for_what_is_there():
    assert [name for name in REASONS if not (SOURCE / name).exists()] == []


def test_each_folder_of_the_package_says_what_it_is_for():
    silent = [
        folder.relative_to(SOURCE).as_posix()
        for folder in folders(SOURCE)
        if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ]
    assert silent == []


def test_each_folder_of_tests_has_few_files_and_no_long_one_or_a_reason():
    tests = [path for path in (ROOT / "tests").rglob("*") if path.is_dir() or path.suffix == ".py"]
    large = {
        path.relative_to(ROOT / "tests").as_posix()
        for path in tests
        if (len(modules(path)) > MOST_FILES if path.is_dir() else length(path) > MOST_LINES)
    }
    assert large == set(REASONS_OF_TESTS)


@pytest.mark.parametrize("page", [*_PAGES, *sorted(map(str, (ROOT / "docs").rglob("*.md")))])
def test_the_files_that_a_page_names_are_there(page):
    assert missing_files((ROOT / page).read_text()) == []


def test_the_check_bites(tmp_path):
    (tmp_path / "__init__.py").write_text('"""A package."""\n')
    for number in range(MOST_FILES + 1):
        (tmp_path / f"m{number}.py").write_text("x = 1\n" * FEWEST_LINES)
    (tmp_path / "m0.py").write_text("x = 1\n" * (MOST_LINES + 1))
    assert large_folders(tmp_path) == {".": MOST_FILES + 1}
    assert odd_files(tmp_path) == {"m0.py": MOST_LINES + 1}
    text = "`tests/checks/test_tree.py`, `domain/layouts/mesh.py` and `domain/meshes.py`"
    assert missing_files(text) == ["domain/meshes.py"]
