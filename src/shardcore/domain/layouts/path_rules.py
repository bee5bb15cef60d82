"""Rules keyed by paths, which give a value to each variable of a model, and their report."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import Generic, Literal, TypeVar

import attrs

from shardcore.domain.errors import RuleError
from shardcore.domain.layouts.path_keys import PathKey, dotted, hint, spellings

T = TypeVar("T")


@attrs.frozen
class Match(Generic[T]):
    """The rule that decides a path."""

    key: str  # the rule's key, as the user wrote it
    value: T
    # "exact" when the key is one of the path's spellings, "pattern" when it is a regular expression
    # that matches the whole of one.
    how: Literal["exact", "pattern"]


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
        """Writes the whole report as aligned lines of text."""
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


def _collect(rules: Mapping[str, T] | Iterable[tuple[str, T]]) -> dict[str, T]:
    collected: dict[str, T] = {}
    for key, value in rules.items() if isinstance(rules, Mapping) else rules:
        if key in collected:
            raise RuleError(
                f"The key {key!r} is given twice: {collected[key]!r} and {value!r}. Keep one.",
                name=key,
            )
        collected[key] = value
    return collected


@attrs.frozen(eq=False)
class PathRules(Mapping[str, T]):
    """An immutable mapping from keys to values, with a lookup by path.

    `match` returns the rule that decides a path: the key that spells the path, else the one regular
    expression that matches all of it. Keys and paths may be spelled as in Keras or as in PyTorch;
    see docs/reference/rules.md.

    Raises:
        RuleError: If a key is empty, given twice, or not a valid regular expression.

    Example:
        >>> rules = PathRules({".*dense.*kernel": "columns", "block_0/dense/kernel": "rows"})
        >>> rules.match("block_0.dense.weight")
        Match(key='block_0/dense/kernel', value='rows', how='exact')
        >>> rules.match("block_1.dense.weight")
        Match(key='.*dense.*kernel', value='columns', how='pattern')
        >>> rules.match("block_1/dense/bias") is None
        True
    """

    _rules: Mapping[str, T] = attrs.field(converter=_collect, default=())
    _keys: Mapping[str, PathKey] = attrs.field(init=False, repr=False)
    _exact: Mapping[str, Sequence[str]] = attrs.field(init=False, repr=False)
    _patterns: Sequence[PathKey] = attrs.field(init=False, repr=False)
    _answers: dict[str, Match[T] | None] = attrs.field(init=False, repr=False, factory=dict)

    @_keys.default
    def _read_keys(self) -> Mapping[str, PathKey]:
        return {key: PathKey(key) for key in self._rules}

    @_exact.default
    def _by_exact_name(self) -> Mapping[str, Sequence[str]]:
        keys: dict[str, list[str]] = {}
        for key in self._keys.values():
            keys.setdefault(key.exact_name, []).append(key.text)
        return keys

    @_patterns.default
    def _only_patterns(self) -> Sequence[PathKey]:
        return [key for key in self._keys.values() if key.is_pattern]

    def __getitem__(self, key: str) -> T:
        return self._rules[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def match(self, path: str) -> Match[T] | None:
        """Finds the rule for the path of a variable, or of an output; None if none matches it.

        Raises:
            RuleError: If several rules match.
        """
        if path not in self._answers:
            self._answers[path] = self._find(path)
        return self._answers[path]

    def report(self, paths: Iterable[str]) -> RulesReport:
        """Lists the rule of each path, the unused rules, and hints for these.

        `paths` has every path of the model that a rule may be meant for, also those of outputs.

        Raises:
            RuleError: If several rules match one of the paths.
        """
        matches = {path: self.match(path) for path in paths}
        matched = {path: match.key for path, match in matches.items() if match}
        used = set(matched.values())
        unused = [key for key in self._keys.values() if key.text not in used]
        hints = {key.text: hint(key, matches, matched) for key in unused}
        return RulesReport(
            matched=matched,
            unused_rules=tuple(key.text for key in unused),
            unmatched_paths=tuple(path for path, match in matches.items() if match is None),
            hints={key: text for key, text in hints.items() if text},
        )

    def _find(self, path: str) -> Match[T] | None:
        how: Literal["exact", "pattern"] = "exact"
        keys = self._exact_keys(path)
        if not keys:
            how = "pattern"
            keys = self._pattern_keys(path)
        if len(keys) > 1:
            raise _ambiguous(path, keys, how)
        return Match(keys[0], self._rules[keys[0]], how) if keys else None

    def _exact_keys(self, path: str) -> list[str]:
        # A mapping looks its own keys up: a path that equals a pattern gets that rule.
        if path in self._keys and self._keys[path].is_pattern:
            return [path]
        names = spellings(path)
        return [key for name in names for key in self._exact.get(name, ())]

    def _pattern_keys(self, path: str) -> list[str]:
        # The Keras name has precedence over the PyTorch name: rules for `.*bias` and `.*beta` in
        # one map are not both meant for a `beta`.
        own = (path, dotted(path)) if "/" in path else ()
        for names in (own, spellings(path)):
            keys = [key.text for key in self._patterns if key.fullmatches(names)]
            if keys:
                return keys
        return []


def _ambiguous(path: str, keys: Sequence[str], how: str) -> RuleError:
    remedy = {
        "exact": "They spell the same variable in two ways: keep one of them.",
        "pattern": f"Make all but one narrower, or add a rule with the exact key {path!r}.",
    }[how]
    listed = ", ".join(map(repr, keys))
    # The first words of the error of Keras.
    return RuleError(
        f"Path {path!r} matches multiple layout specification keys, and one at most may match: "
        f"{listed}. {remedy}"
    )
