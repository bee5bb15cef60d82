"""Measures which lines of shardcore tests run, in each process that they fork.

A statement that sets a byte stands before the last of statements that run together: if it runs, so
did they. The bytes are in a file that all processes have mapped into memory: a rank that is killed
has saved its lines.

Why no package does it: coverage.py traces each call of Python before 3.12, which makes tests on
ranks slower by half, and at the end of a process slipcover writes a file, which killed ranks would
not reach.

    python -m tests.line_coverage 90    # prints the lines that no test ran; fails below 90 %
"""

import ast
import importlib.abc
import importlib.machinery
import marshal
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardcore"
# By lines: the bytes. By files: the compiled code that sets them.
FOLDER = ROOT / "build" / "lines"
# The name of the variable that asks for it.
VARIABLE = "SHARDCORE_LINES"
_NAME = "__lines__"


def measure() -> None:
    """Measures what this process and its forks import from now on, if the variable is set."""
    is_measured = any(isinstance(each, _Finder) for each in sys.meta_path)  # in a fork it is
    if VARIABLE not in os.environ or is_measured:
        return
    assert "shardcore" not in sys.modules, "shardcore was imported before its lines are measured"
    FOLDER.mkdir(parents=True, exist_ok=True)
    sys.meta_path.insert(0, _Finder())


@cache
def _starts() -> dict[str, int]:
    """Returns the place of the first byte of each file."""
    starts, end = {}, 0
    for path in sorted(SOURCE.rglob("*.py")):
        starts[str(path)] = end
        end += path.read_bytes().count(b"\n") + 2  # lines begin with 1
    return starts | {"": end}


@cache
def _bytes() -> mmap.mmap:
    with (FOLDER / "bytes").open("a+b") as file:
        file.truncate(_starts()[""])
        return mmap.mmap(file.fileno(), 0)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of shardcore."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "shardcore":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in _starts():
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_NAME] = _bytes()
        exec(_compiled(Path(self.path)), vars(module))


def _compiled(path: Path) -> CodeType:
    """Returns the code of a file with statements that set bytes; compiles it once for all."""
    start, age = _starts()[str(path)], path.stat().st_mtime_ns
    name = ".".join(path.relative_to(SOURCE).parts)
    kept = FOLDER / f"{name}-{start}-{age}.{sys.implementation.cache_tag}"
    if kept.exists():
        return marshal.loads(kept.read_bytes())
    tree = ast.parse(path.read_bytes())
    for body in _bodies(tree):
        marked = {each for each in _marked(body) if not _is_text(each)}
        body[:] = [
            new for old in body for new in ((_mark(old, start), old) if old in marked else (old,))
        ]
    code = compile(tree, str(path), "exec", dont_inherit=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(marshal.dumps(code))
    unfinished.rename(kept)
    return code


def _mark(statement: ast.stmt, start: int) -> ast.stmt:
    """Returns the statement that sets the byte of a statement."""
    mark = ast.parse(f"{_NAME}[{start + statement.lineno}] = 1").body[0]
    for node in ast.walk(mark):
        ast.copy_location(node, statement)
    return mark


def _marked(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Returns for each statement of a body the one whose byte says that it ran.

    That is the last of the statements that run together, or the first of them that has a body.
    """
    found: list[ast.stmt] = []
    for statement in reversed(body):
        found.append(found[-1] if found and not _has_body(statement) else statement)
    return found[::-1]


def _has_body(statement: ast.stmt) -> bool:
    return hasattr(statement, "body") or isinstance(statement, ast.Match)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields the statements that follow each other, without those that only type checkers read."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list) and not _is_for_types(node):
                yield body


def _is_for_types(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", ())
    is_overload = any(getattr(each, "id", "") == "overload" for each in decorators)
    return is_overload or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))


def report() -> float:
    """Prints the lines of each file that no test ran; returns the percentage of those that did."""
    every, missed = 0, 0
    hits = _bytes()
    for name, start in _starts().items():
        tree = ast.parse(Path(name).read_bytes() if name else "")
        marks = {
            statement.lineno: marked.lineno
            for body in _bodies(tree)
            for statement, marked in zip(body, _marked(body), strict=True)
            if not _is_text(statement)
        }
        lines = sorted(marks)
        without = [line for line in lines if not hits[start + marks[line]]]
        every, missed = every + len(lines), missed + len(without)
        if without:
            relative = Path(name).relative_to(SOURCE)
            print(f"{relative}: {len(without)} of {len(lines)}: {_ranges(lines, without)}")
    share = 100 * (every - missed) / every
    print(f"{share:.1f} % of {every} lines were run.")
    return share


def _ranges(lines: list[int], without: list[int]) -> str:
    """Returns "3-5, 8" for lines that no test ran, if lines 3 to 5 follow each other."""
    found: list[list[int]] = []
    for line in without:
        follows = found and lines[lines.index(line) - 1] == found[-1][-1]
        if follows:
            found[-1].append(line)
        else:
            found.append([line])
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}" for each in found)


if __name__ == "__main__":
    fewest = float(sys.argv[1])
    if report() < fewest:
        sys.exit(f"Expected that tests run at least {fewest:g} % of the lines.")
