"""Report on the rules that matched a model's paths, with hints for unused rules."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from textwrap import wrap

import attrs

from shardcore.domain.errors import RuleError
from shardcore.domain.layouts.paths.key import PathKey, slashed, spellings

# A word of a key or of a path.
_WORD = re.compile(r"[A-Za-z]\w+")


@attrs.frozen
class RulesReport:
    """The rule of each path, the unused rules and the unmatched paths.

    Args:
        matched: For each path that a rule matched, that rule's key.
        unused_rules: The keys that decided no path.
        unmatched_paths: The paths that no rule matched.
        hints: For some unused keys, a remedy.

    Example:
        >>> print(RulesReport({"up/kernel": ".*kernel"}, unused_rules=(".*weight",)))
        Paths that a rule matched:
          up/kernel  .*kernel
        Rules that matched nothing:
          .*weight
    """

    matched: Mapping[str, str]
    unused_rules: tuple[str, ...] = ()
    unmatched_paths: tuple[str, ...] = ()
    hints: Mapping[str, str] = attrs.field(factory=dict)

    def summary(self) -> str:
        """Returns the whole report as aligned lines of text."""
        unused = {key: self.hints.get(key, "") for key in self.unused_rules}
        sections = (
            ("Paths that a rule matched:", _table(self.matched)),
            ("Rules that matched nothing:", _table(unused)),
            ("Paths that no rule matched:", _table(dict.fromkeys(self.unmatched_paths, ""))),
        )
        lines = [line for title, rows in sections if rows for line in (title, *rows)]
        return "\n".join(lines) or "No rules and no paths."

    def __str__(self) -> str:
        return self.summary()


def _table(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    lines = [f"  {left:<{width}}  {right}".rstrip() for left, right in rows.items()]
    if max(map(len, lines), default=0) <= 80:
        return lines
    below = partial(wrap, width=80, initial_indent="    ", subsequent_indent="    ")
    return [line for left, right in rows.items() for line in (f"  {left}", *below(right))]


def hint(key: PathKey, paths: Collection[str], matched: Mapping[str, str]) -> str | None:
    """Returns a hint for a `key` that decided no path; `matched` has the keys that did."""
    return (
        _overruled(key, matched)
        or _unanchored(key, paths)
        or _misspelt(key, paths)
        or _closest(key, paths)
    )


def _overruled(key: PathKey, matched: Mapping[str, str]) -> str | None:
    for path, winner in matched.items():
        if key.fullmatches(spellings(path)):
            return f"the exact key {winner!r} has precedence on {path!r}"
    return None


def _unanchored(key: PathKey, paths: Iterable[str]) -> str | None:
    """Returns the hint for a key that `re.search` would find: older Keras releases used it."""
    meant = _meant(widen(key), paths)
    return meant and f"a rule must match the whole path: {meant}"


def _meant(text: str, paths: Iterable[str]) -> str | None:
    """Returns the question whether the key `text` is meant; None if it matches no path."""
    try:
        key = PathKey(text)
    except RuleError:  # such as inline flags, which must come first
        return None
    matches = [path for path in paths if key.fullmatches(spellings(path))]
    if not matches:
        return None
    more = f" and {len(matches) - 1} more" if len(matches) > 1 else ""
    return f"did you mean {text!r}? It matches {matches[0]!r}{more}"


def _misspelt(key: PathKey, paths: Collection[str]) -> str | None:
    """Returns a hint for a key with a word that is almost a word of a path."""
    known = dict.fromkeys(word for path in paths for word in _WORD.findall(path))
    for match in _WORD.finditer(key.text):
        for near in difflib.get_close_matches(match[0], known):
            meant = _meant(key.text[: match.start()] + near + key.text[match.end() :], paths)
            if meant:
                return meant
    return None


def widen(key: PathKey) -> str:
    """Returns the regular expression that matches each path in which `key` would be found.

    Example:
        >>> widen(PathKey("dense.kernel")), widen(PathKey(".*dense|conv"))
        ('.*dense/kernel.*', '.*(.*dense|conv).*')
    """
    text = key.text if key.is_pattern else slashed(key.text)
    if "|" in text:
        return f".*({text}).*"
    return ("" if text.startswith(".*") else ".*") + text + ("" if text.endswith(".*") else ".*")


def _closest(key: PathKey, paths: Collection[str]) -> str | None:
    if not key.is_pattern:  # the hint is spelled as the key is
        paths = dict.fromkeys(name for path in paths for name in spellings(path))
    near = difflib.get_close_matches(key.text, paths, n=1)
    return f"the closest path is {near[0]!r}" if near else None
