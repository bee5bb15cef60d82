"""docs/reference/keras-tests.md: the outcomes of Keras' own tests by package."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests import generated
from tests.compat.environments import ROOT
from tests.keras_tests import running
from tests.keras_tests.reasons import CANNOT, LEFT_OUT

PAGE = ROOT / "docs" / "reference" / "keras-tests.md"
BEGIN, END = "<!-- run: make keras-tests -->", "<!-- end of run -->"
KINDS = ("passed", "refused", "cannot", "failed", "plain", "skipped")


def write(results: dict[str, Any]) -> None:
    """Replaces the text between the two marks; the rest of the page is written by hand."""
    generated.write(PAGE, BEGIN, END, _lines(results))


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + ".\n"
    yield f"| variant | files that ran | {' | '.join(KINDS)} | days | commits |"
    yield f"|---|--:|{'--:|' * len(KINDS)}---|---|"
    for variant, files in results["variants"].items():
        days, commits = ({result[of] for result in files.values()} for of in ("day", "commit"))
        counts = _sum(files.values())
        numbers = " | ".join(f"{counts[kind]:,}" for kind in KINDS)
        total = len(running.files([""], only_operators="inputs" in variant))
        ran = f"{len(files)} of {total}"
        yield f"| {variant} | {ran} | {numbers} | {_joined(days)} | {_joined(commits)} |"
    for variant, files in results["variants"].items():
        yield f"\n### {variant}\n"
        yield f"| package | {' | '.join(KINDS)} |"
        yield f"|---|{'--:|' * len(KINDS)}"
        packages = defaultdict(list)
        for file, result in sorted(files.items()):
            packages[package(file)].append(result)
        for name, of_package in packages.items():
            counts = _sum(of_package)
            yield f"| {name} | {' | '.join(str(counts[kind] or '') for kind in KINDS)} |"
    yield "\n### Reasons\n"
    yield "| variant | tests | reason |"
    yield "|---|---|---|"
    yield from (f"| {variant} | `{names}` | {reason} |" for variant, names, reason in CANNOT)
    yield from (f"| all | `{file}` | {reason} |" for file, reason in LEFT_OUT.items())


def package(file: str) -> str:
    """Returns the folder of a file, or the first two of them.

    Example:
        >>> package("layers/core/dense_test.py"), package("losses/losses_test.py")
        ('layers/core', 'losses')
    """
    return "/".join(file.split("/")[:-1][:2])


def _sum(results: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
    return counts


def _joined(words: set[str]) -> str:
    return ", ".join(sorted(words))
