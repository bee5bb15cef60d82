"""Measures of the source, as a stranger took them of this and of other code bases.

python -m tests.measures    # writes docs/contributing/measures.md
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import attrs

from tests import generated

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shardcore"
PAGE = ROOT / "docs" / "contributing" / "measures.md"
BEGIN, END = "<!-- run: python -m tests.measures -->", "<!-- end of run -->"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# What adds a path through a function.
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.BoolOp, ast.comprehension)
# The words that say no more than "Returns".
RETURNS = ("Returns", "Gives", "Gets")
POOR = frozenset({"each", "found"})


@attrs.frozen
class Module:
    """A file of source.

    Args:
        text: Its text.
        tree: Its syntax.
    """

    text: str
    tree: ast.Module

    @classmethod
    def of(cls, path: Path) -> "Module":
        """Reads a file."""
        text = path.read_text()
        return cls(text, ast.parse(text))

    @property
    def lines(self) -> int:
        """The number of its lines, blank ones and comments included."""
        return len(self.text.splitlines())

    @property
    def functions(self) -> list[Function]:
        """Its functions and methods."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @property
    def comments(self) -> int:
        """The number of its lines that are a comment alone."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = (token for token in tokens if token.type == tokenize.COMMENT)
        return sum(token.line.lstrip().startswith("#") for token in comments)

    @property
    def imports(self) -> int:
        """The number of lines of its import statements."""
        nodes = (n for n in ast.walk(self.tree) if isinstance(n, ast.Import | ast.ImportFrom))
        return sum((node.end_lineno or 0) - node.lineno + 1 for node in nodes)

    @property
    def docstrings(self) -> list[str]:
        """The docstrings of its functions."""
        return [text for function in self.functions if (text := ast.get_docstring(function))]

    @property
    def poor_names(self) -> int:
        """The number of bindings of variables that are called `each` or `found`."""
        names = (n for n in ast.walk(self.tree) if isinstance(n, ast.Name))
        return sum(isinstance(n.ctx, ast.Store) and n.id in POOR for n in names)


def paths_through(function: Function) -> int:
    """The cyclomatic complexity of a function."""
    return 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def table(modules: Sequence[Module]) -> Iterator[str]:
    """Yields the lines of the page."""
    functions = [function for module in modules for function in module.functions]
    lengths = [(f.end_lineno or 0) - f.lineno + 1 for f in functions]
    lines = sum(module.lines for module in modules)
    docstrings = [text for module in modules for text in module.docstrings]
    returning = sum(text.startswith(RETURNS) for text in docstrings) / len(docstrings)
    poor_names = sum(module.poor_names for module in modules)
    files = _spread(module.lines for module in modules)
    yield "| measure | today | goal |"
    yield "|---|--:|--:|"
    yield f"| files | {len(modules)} | at most 270 |"
    yield f"| lines | {lines:,} | |"
    yield f"| lines of a file: median, 90 of 100, longest | {files} | |"
    yield f"| functions | {len(functions):,} | |"
    yield f"| lines of a function | {_spread(lengths)} | |"
    yield f"| paths through a function | {_spread(map(paths_through, functions))} | |"
    yield f"| lines that are a comment | {sum(m.comments for m in modules) / lines:.1%} | |"
    yield f"| lines of imports | {sum(m.imports for m in modules) / lines:.1%} | at most 6% |"
    yield f"| functions with a docstring | {len(docstrings) / len(functions):.0%} | |"
    yield f"| that begins with Returns, Gives or Gets | {returning:.0%} | at most 25% |"
    yield f"| variables called `each` or `found` | {poor_names} | at most 40 |"


def _spread(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return f"{median(ordered):.0f}, {ordered[len(ordered) * 9 // 10]}, {ordered[-1]}"


def modules() -> list[Module]:
    """The files of the package."""
    return [Module.of(path) for path in sorted(SOURCE.rglob("*.py"))]


if __name__ == "__main__":
    generated.write(PAGE, BEGIN, END, table(modules()))
