"""Each subject has a page, of at most 60 lines, and every name on it is in the source."""

import ast
import re
from pathlib import Path

import pytest

from tests import subjects

PAGES = subjects.ROOT / "docs" / "explanation" / "subjects"
MOST_LINES = 60
LAYERS = (*subjects.LAYERS, "policies", "strategies")
NAMES = re.compile(rf"`((?:{'|'.join(LAYERS)})\.[\w.]+)(?:\(\))?`")


def missing(text: str) -> list[str]:
    """Lists the dotted names of a page that are no module, and no name in one."""
    return [name for name in NAMES.findall(text) if not is_there(name)]


def is_there(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = subjects.SOURCE.joinpath(*parts[:count])
        if path.is_dir():
            return count == len(parts) or defines(path / "__init__.py", parts[count:])
        if path.with_suffix(".py").exists():
            return defines(path.with_suffix(".py"), parts[count:])
    return False


def defines(file: Path, names: list[str]) -> bool:
    """Whether a file defines a name, or a class with a member of that name."""
    body = ast.parse(file.read_text()).body
    for name in names:
        nodes = [node for node in body if name in bound_by(node)]
        if not nodes:
            return False
        body = getattr(nodes[0], "body", [])
    return True


def bound_by(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("subject", subjects.SUBJECTS)
def test_a_subject_has_a_page_with_names_of_the_source(subject):
    text = (PAGES / f"{subject}.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert len(NAMES.findall(text)) >= 8
    assert missing(text) == []


def test_a_name_that_is_not_there_is_seen():
    text = "`domain.layouts.mesh.Mesh.size`, `domain.layouts.mesh.Net` and `adapters.motor`"
    assert missing(text) == ["domain.layouts.mesh.Net", "adapters.motor"]
