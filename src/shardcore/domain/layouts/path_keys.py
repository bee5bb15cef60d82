"""Keys of rules (names or regular expressions), spellings of paths, hints for unused keys."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from shardcore.domain.errors import RuleError

SEPARATORS: Final = ("/", ".")

# Only names with one meaning in all layers. Left out: RMSNormalization's `scale` (in an attention
# layer `scale` is no torch weight), PReLU's `alpha`, and the LSTM `kernel` as `weight_ih` (a rule
# `.*weight_.*` would then match every kernel).
KERAS_TO_TORCH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kernel": "weight",
        "embeddings": "weight",
        "gamma": "weight",
        "beta": "bias",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
        "recurrent_kernel": "weight_hh",
    }
)


# Every character that means something in a regular expression, except the dot.
METACHARACTERS: Final = frozenset(r"\^$*+?{}[]()|")
# A word of a key or of a path.
_WORD: Final = re.compile(r"[A-Za-z]\w+")
_NAMES_A_DOT: Final = re.compile(r"\\\.|\[[^\]]*\.")


def slashed(path: str) -> str:
    """Writes every separator as a slash: `dense/kernel`, as Keras does."""
    return path.replace(".", "/")


def dotted(path: str) -> str:
    """Writes every separator as a dot: `dense.weight`, as torch does."""
    return path.replace("/", ".")


def spellings(path: str) -> tuple[str, ...]:
    """Lists every spelling of `path`, the given one first.

    The separators may be all `/` or all `.`, and the last name may be any that Keras or PyTorch
    gives to the same variable. A path with a slash is a Keras path, so its last name is a Keras
    name: `dense/bias` is a bias and never a `beta`. A path without one may be a PyTorch path.

    Example:
        >>> spellings("dense/kernel")
        ('dense/kernel', 'dense/weight', 'dense.kernel', 'dense.weight')
        >>> spellings("norm.bias")
        ('norm.bias', 'norm/bias', 'norm/beta', 'norm.beta')
        >>> spellings("dense/bias")
        ('dense/bias', 'dense.bias')
    """
    cut = max(path.rfind(separator) for separator in SEPARATORS) + 1
    last = path[cut:]
    others = [torch for keras, torch in KERAS_TO_TORCH.items() if keras == last]
    if not others and "/" not in path:
        others = [keras for keras, torch in KERAS_TO_TORCH.items() if torch == last]
    names = [path[:cut] + other for other in (last, *others)]
    return tuple(dict.fromkeys([path, *map(slashed, names), *map(dotted, names)]))


def _checked_text(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise RuleError(
            f"A rule's key must be a non-empty string, got {text!r}. Write a variable's path "
            "('block_0/dense/kernel') or a regular expression ('.*dense.*kernel').",
            got=repr(text),
        )
    return text


@attrs.frozen
class PathKey:
    r"""A rule's key, parsed once.

    A key without a regular-expression character other than the dot is a **name**: each `.` and
    `/` in it is a separator. Any other key is a **pattern**, in which `.` is any character and a
    separator is written `/` or `\.`. A pattern with one of the two is compared only with spellings
    that use it, so that `[^/]+` stays within one name (ADR 9).

    Attributes:
        pattern: The compiled regular expression; None for a name.
        separators: The separators in a pattern; empty for a name.

    Raises:
        RuleError: If the key is not a non-empty string, or not a valid regular expression.

    Example:
        >>> PathKey("dense_1.kernel").is_pattern, PathKey("dense_1.*kernel").is_pattern
        (False, True)
        >>> PathKey(r"block_\d+/dense").separators
        ('/',)
    """

    text: str = attrs.field(converter=_checked_text)  # the key as the user wrote it
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
                "that stands for itself.",
                name=self.text,
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
        """The spelling that this key equals: with slashes for a name, itself for a pattern."""
        return self.text if self.is_pattern else slashed(self.text)

    def fullmatches(self, names: Iterable[str]) -> bool:
        """Tells whether the pattern matches all of one spelling; always False for a name."""
        pattern = self.pattern
        return pattern is not None and any(
            pattern.fullmatch(name) for name in names if self._fits_separator(name)
        )

    def _fits_separator(self, spelling: str) -> bool:
        used = [separator for separator in SEPARATORS if separator in spelling]
        return len(self.separators) != 1 or not used or self.separators[0] in used


def hint(key: PathKey, paths: Collection[str], matched: Mapping[str, str]) -> str | None:
    """Looks for a hint for a `key` that decided no path; `matched` has the keys that did."""
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
    """Hints at a key that `re.search` would find: older Keras releases used it."""
    meant = _meant(_widen(key), paths)
    return meant and f"a rule must match the whole path: {meant}"


def _meant(text: str, paths: Iterable[str]) -> str | None:
    """Asks whether the key `text` is meant; None if it matches no path."""
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
    """Hints at a word of a key that is almost a word of a path."""
    known = dict.fromkeys(word for path in paths for word in _WORD.findall(path))
    for match in _WORD.finditer(key.text):
        for near in difflib.get_close_matches(match[0], known):
            meant = _meant(key.text[: match.start()] + near + key.text[match.end() :], paths)
            if meant:
                return meant
    return None


def _widen(key: PathKey) -> str:
    """Builds the regular expression that matches each path in which `key` would be found.

    Example:
        >>> _widen(PathKey("dense.kernel")), _widen(PathKey(".*dense|conv"))
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
