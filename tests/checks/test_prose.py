"""Docstrings, comments, messages and pages are plain: some words are banned, sentences are short.

This reads the docstrings, comments and string literals of Python files, and the text of Markdown
files without their code. The length of sentences is that of pages, without their tables.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checks.tree import ROOT

# The files and folders that are read.
READ = (
    *("src", "tests", "benchmarks", "examples", "docs"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
# The folders in them that are not.
UNREAD: tuple[str, ...] = ()

# Banned words, as patterns, and what to write instead.
REMEDIES = {
    r"anew": "again, or the verb itself: recompute, re-create",
    r"hangs? on": "depends on",
    r"lies?": "is, or: is stored",
    r"told": "gets, is passed, is notified",
    r"(no|some)body": "the one who acts, or the passive: no caller reads it, it is unused",
    r"its kind": "the name of what it is like",
    r"(is|are) through": "has finished",
    r"of (its|one's|their) own": "its own ..., or nothing",
    r"(is|are|be|been|stays?|not|never) split": "sharded",
    r"(axis|axes|ranks?|policy|policies|strategy)( that)? splits?": "shards",
    r"split (over|across|along|evenly|unevenly|dims?|(by|in) (rows|columns|heads))": "sharded",
    r"whole (tensor|operand|weight|kernel|gradient|activation|variable)s?": "full ...",
    r"whole batch(es)?": "global batch",
    r"(?<!-)gather(s|ed|ing)? (weight|tensor|shard|kernel|activation|gradient)s?": "all-gather",
}
# A word of names: `aten.split` is of torch, and is not defined here.
NAMES = re.compile(r"(^|_)split(s|ting|ter)?(_|$)|Split")
NAMES_REMEDY = "shard, sharded or sharding"
# The first words that make a docstring a riddle.
RIDDLES = r"(What|Where|How|Who|Whose|That|Those|Which)\b"
RIDDLE_REMEDY = "begin with a verb (Returns ...) or, for a class or a module, with a noun"

MEAN_WORDS = 22  # of the sentences of a page, at most
MOST_WORDS = 60  # of one sentence

_BANNED = {
    re.compile(rf"\b{pattern}\b".replace(" ", r"\s+"), re.IGNORECASE): remedy
    for pattern, remedy in REMEDIES.items()
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Passage = tuple[int, str]


def comments(source: str) -> Iterator[Passage]:
    """Yields runs of comments on consecutive lines, each with its first line number."""
    start, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != start + len(lines):
                yield start, "\n".join(lines)
                lines = []
            start = start if lines else token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield start, "\n".join(lines)


def literals(tree: ast.Module) -> Iterator[Passage]:
    """Yields string literals, docstrings among them, each with its line number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def riddles(tree: ast.Module) -> Iterator[str]:
    """Yields the docstrings whose first line is a riddle."""
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text and re.match(RIDDLES, text):
            line = node.body[0].lineno  # type: ignore[attr-defined]
            yield f"{line}: '{text.splitlines()[0]}': {RIDDLE_REMEDY}"


def names(tree: ast.Module) -> Iterator[Passage]:
    """Yields the names that a module defines, each with its line number."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def prose(markdown: str) -> str:
    """Returns the text without code; its lines keep their numbers."""
    fence = r"^([ \t]*)(`{3,}|~{3,}).*?^[ \t]*\2[ \t]*$"
    text = re.sub(
        fence, lambda code: "\n" * code[0].count("\n"), markdown, flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`]*`", lambda code: "\n" * code[0].count("\n") or "code", text)


def sentences(markdown: str) -> list[str]:
    """Returns the sentences of a page, of three words or more, without tables and titles."""
    text = re.sub(r"^([|#]|!\[).*$", "", prose(markdown), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # the targets of links
    items = re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", text, flags=re.MULTILINE)
    paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", items))
    found = (each for p in paragraphs for each in re.split(r"(?<=[.!?])\s+(?=[A-Z*\[]|code)", p))
    return [each for each in found if len(each.split()) > 2]


def long_sentences(markdown: str) -> list[str]:
    """Returns the sentences of too many words; the mean if it is too high."""
    found = sentences(markdown)
    mean = sum(len(each.split()) for each in found) / max(len(found), 1)
    long = [each for each in found if len(each.split()) > MOST_WORDS]
    return long if mean <= MEAN_WORDS else [*long, f"{mean:.1f} words a sentence"]


def findings(path: Path) -> Iterator[str]:
    """Yields, for each banned word of a file, its line, the word, and what to write instead."""
    text = path.read_text()
    if path.suffix == ".md":
        passages: list[Passage] = [(1, prose(text))]
    else:
        tree = ast.parse(text)
        passages = [*comments(text), *literals(tree)]
        yield from riddles(tree)
        for line, name in names(tree):
            if NAMES.search(name):
                yield f"{line}: '{name}': write {NAMES_REMEDY}"
    for start, passage in passages:
        for pattern, remedy in _BANNED.items():
            for found in pattern.finditer(passage):
                line = start + passage.count("\n", 0, found.start())
                yield f"{line}: '{' '.join(found[0].split())}': write {remedy}"


def files(name: str) -> list[Path]:
    """Returns the Python and Markdown files of a file or a folder, without this one."""
    place, left_out = ROOT / name, {Path(__file__), *(ROOT / each for each in UNREAD)}
    found = [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")]
    return sorted(path for path in found if left_out.isdisjoint((path, *path.parents)))


@pytest.mark.parametrize("name", READ)
def test_the_prose_is_plain(name: str) -> None:
    read = files(name)
    assert read, f"{name} has no files to read"
    found = [f"{path.relative_to(ROOT)}:{each}" for path in read for each in findings(path)]
    assert not found, "\n".join(found)


def test_the_sentences_of_each_page_are_short() -> None:
    pages = [path for name in READ for path in files(name) if path.suffix == ".md"]
    found = {str(page.relative_to(ROOT)): long_sentences(page.read_text()) for page in pages}
    assert len(found) > 80
    assert not {name: each for name, each in found.items() if each}


def test_a_long_sentence_is_found() -> None:
    short, long = "It has three words more. " * 9, "word " * (MOST_WORDS + 1)
    assert long_sentences(f"# A title\n\n| a table |\n\n- {short}\n") == []
    assert long_sentences(f"{short}\n\n- {long}\n") == [long.strip()]
    assert long_sentences("word " * MOST_WORDS) == ["60.0 words a sentence"]


@pytest.mark.parametrize(
    ("name", "text", "report"),
    [
        ("a.py", '"""Sums.\n\nIt hangs\non x."""\n', "3: 'hangs on': write depends on"),
        ("a.py", "x = 1\n# It is\n# through now.\n", "2: 'is through': write has finished"),
        ("a.py", "y = 2\nx = f'{y} is made anew'\n", "2: 'anew': write again"),
        ("a.py", 'def f():\n    """What f does."""\n', f"2: 'What f does.': {RIDDLE_REMEDY}"),
        ("a.md", "An axis\nthat splits it.\n", "1: 'axis that splits': write shards"),
        ("a.py", "def f(x, is_split): ...\n", "1: 'is_split': write shard"),
        ("a.md", "```\ntold\n```\nIt `lies`\nthere. Nobody knows.\n", "5: 'Nobody': write the"),
    ],
)
def test_a_planted_sentence_is_found(tmp_path: Path, name: str, text: str, report: str) -> None:
    (tmp_path / name).write_text(text)
    (found,) = findings(tmp_path / name)
    assert found.startswith(report)


def test_names_and_code_may_use_any_word(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""Sums. It believes what earlies say."""\nlies = told = x.split()\n'
    )
    (tmp_path / "a.md").write_text("~~~python\nlies = 1\n~~~\nSet `told` here.\n")
    assert not [*findings(tmp_path / "a.py"), *findings(tmp_path / "a.md")]
