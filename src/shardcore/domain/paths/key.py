"""How one rule's key is read: as a literal name, or as a regular expression."""

import re
from collections.abc import Iterable
from typing import Final

import attrs

from shardcore.domain.errors import RuleError
from shardcore.domain.paths.spellings import SEPARATORS, slashed

# Every character that means something in a regular expression, except the dot.
METACHARACTERS: Final = frozenset(r"\^$*+?{}[]()|")
_NAMES_A_DOT: Final = re.compile(r"\\\.|\[[^\]]*\.")


def _checked_text(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise RuleError(
            f"A rule's key must be a non-empty string, got {text!r}. Write a variable's path "
            "('block_0/dense/kernel') or a regular expression ('.*dense.*kernel')."
        )
    return text


@attrs.frozen
class PathKey:
    r"""A rule's key, read once.

    A key without a regular-expression character other than the dot is a **name**: each `.` and
    `/` in it is a separator. Any other key is a **pattern**, in which `.` is any character and a
    separator is written `/` or `\.`; a pattern that names one of the two is compared with the
    spellings that use that one, so that `[^/]+` stays within one name.

    Attributes:
        text: The key as the user wrote it.
        pattern: The compiled regular expression; None for a name.
        separators: The separators that a pattern names; empty for a name.

    Raises:
        RuleError: The key is not a non-empty string, or not a valid regular expression.

    Example:
        >>> PathKey("dense_1.kernel").is_pattern, PathKey("dense_1.*kernel").is_pattern
        (False, True)
        >>> PathKey(r"block_\d+/dense").separators
        ('/',)
    """

    text: str = attrs.field(converter=_checked_text)
    pattern: re.Pattern[str] | None = attrs.field(init=False, eq=False, repr=False)
    separators: tuple[str, ...] = attrs.field(init=False, eq=False, repr=False)

    @pattern.default
    def _compile(self) -> re.Pattern[str] | None:
        if METACHARACTERS.isdisjoint(self.text):
            return None
        try:
            return re.compile(self.text)
        except (re.error, OverflowError, RecursionError) as error:
            raise RuleError(
                f"The key {self.text!r} is not a valid regular expression: {error}. Write '.*' "
                "for any text (a lone '*' is not enough), and a backslash before a character "
                "that stands for itself."
            ) from error

    @separators.default
    def _named_separators(self) -> tuple[str, ...]:
        if self.pattern is None:
            return ()
        named = {"/": "/" in self.text, ".": _NAMES_A_DOT.search(self.text) is not None}
        return tuple(separator for separator in SEPARATORS if named[separator])

    @property
    def is_pattern(self) -> bool:
        """Whether the key is a regular expression rather than a name."""
        return self.pattern is not None

    @property
    def exact_name(self) -> str:
        """The spelling that this key equals: slashed for a name, itself for a pattern."""
        return self.text if self.is_pattern else slashed(self.text)

    def fullmatches(self, spellings: Iterable[str]) -> bool:
        """Whether the pattern matches one whole spelling; always False for a name."""
        if self.pattern is None:
            return False
        fullmatch = self.pattern.fullmatch
        return any(fullmatch(name) for name in spellings if self._speaks(name))

    def _speaks(self, spelling: str) -> bool:
        """Whether `spelling` uses a separator that the pattern names, or the pattern names none."""
        if len(self.separators) != 1:
            return True
        if self.separators[0] in spelling:
            return True
        return all(separator not in spelling for separator in SEPARATORS)
