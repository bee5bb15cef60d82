"""Every error that shardcore raises on purpose, under one root."""

from collections.abc import Callable

_ALLOWED = "\n\t"
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    r"""Replaces each character that is none to be read by a mark.

    Lines and tabs stay. Control characters, marks of direction and half characters do not: names of
    folders, variables and layouts may be of a stranger, and a terminal obeys what is in them. All
    that a person sees and shardcore did not write goes through this function.

    Example:
        >>> printable("kernel\x1b[2J\n") == "kernel\ufffd[2J\n"
        True
    """
    if text.isprintable():
        return text
    return "".join(
        char if char in _ALLOWED or char.isprintable() else _REPLACEMENT for char in text
    )


# The most characters of a line about another rank.
_LINE_LENGTH = 1000


def text_of(value: object) -> str:
    """Calls `str(value)`; if that raises, gives the words of Python's tracebacks in its place.

    The errors of other packages and of users go through it: their own code makes the text.

    Example:
        >>> text_of(ValueError("no rows"))
        'no rows'
    """
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - whatever the code of the error raises
        return "<exception str() failed>"


def describe_error(error: BaseException) -> str:
    """Joins the class and the text of an error, which may be of any package.

    Example:
        >>> describe_error(ValueError("no rows"))
        'ValueError: no rows'
    """
    return f"{type(error).__name__}: {text_of(error)}"


def one_line(text: str) -> str:
    r"""Joins the lines of `text`; leaves the end out if it is very long.

    Example:
        >>> one_line("no rows\n  in the table")
        'no rows in the table'
    """
    line = " ".join(text[: 2 * _LINE_LENGTH].split())
    is_all = len(line) <= _LINE_LENGTH and len(text) <= 2 * _LINE_LENGTH
    return line if is_all else f"{line[:_LINE_LENGTH]} ..."


class ShardcoreError(Exception):
    """The root of all errors of this package. Its message may be printed as it is.

    Args:
        message: The message; made of the others if it is not given.

    Attributes:
        name: What is wrong: an argument, a variable, a file, a setting.
        expected: What was expected.
        got: What came.
        remedy: What to do.
        rank: The rank of which it is known.
    All are texts but the rank, and None where an error has none.

    Example:
        >>> error = ShardcoreError(name="agree(how)", expected='"any" or "all"', got="'most'")
        >>> print(error)
        Expected "any" or "all" for agree(how), got 'most'.
        >>> error.name, error.remedy
        ('agree(how)', None)
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        name: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.name, self.expected, self.got = name, expected, got
        self.remedy, self.rank = remedy, rank
        super().__init__(printable(self._text() if message is None else message))

    def _text(self) -> str:
        subject = "" if self.name is None else f" for {self.name}"
        remedy = "" if self.remedy is None else f": {self.remedy}"
        return f"Expected {self.expected}{subject}, got {self.got}{remedy}."

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        """Pickles class, message and attributes, for another rank."""
        return _unpickle, (type(self), self.args), self.__dict__


def _unpickle(kind: type[ShardcoreError], args: tuple[object, ...]) -> ShardcoreError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ControlFlow(Exception):  # noqa: N818 - it is no error
    """A way out of nested calls inside shardcore, which catches it: no user sees it."""


class MeshError(ShardcoreError, ValueError):
    """A mesh, an axis name or a rank that is invalid."""


class LayoutError(ShardcoreError, ValueError):
    """A layout that is invalid, or that does not fit its tensor."""


class RuleError(ShardcoreError, ValueError):
    """A rule that is malformed or wrong, or rules that contradict each other."""


class ArgumentProblem(ShardcoreError, ValueError):  # noqa: N818, ArgumentError is argparse's
    """An argument that a function of shardcore cannot use."""


class CallProblem(ShardcoreError, RuntimeError):  # noqa: N818 - as the one above
    """A call at a time or on a thread at which it cannot work."""


class ShardedTensorError(ShardcoreError, RuntimeError):
    """An operation that a sharded tensor does not have."""


class StrategyError(ShardcoreError, RuntimeError):
    """A strategy that does not exist, cannot be used here, or breaks its contract."""


class EnvironmentProblem(ShardcoreError, RuntimeError):  # noqa: N818, EnvironmentError is Python's
    """The wrong Keras backend, or a missing or unknown version of Keras or torch."""


class RankMismatchError(ShardcoreError, RuntimeError):
    """Ranks differ in a value that must be equal on all of them.

    Attributes:
        waited_in_vain: Whether this rank waited for others that did not come: the ranks are no
            longer at one place of the program.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        waited_in_vain: bool = False,
        name: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, name=name, expected=expected, got=got, remedy=remedy, rank=rank)
        self.waited_in_vain = waited_in_vain


class OtherRankFailed(ShardcoreError, RuntimeError):  # noqa: N818 - it says what happened
    """Another rank has failed, or SIGTERM came: this rank ends."""


class RankFailed(ShardcoreError, RuntimeError):  # noqa: N818 - it says what happened
    """A rank that this process started raised, died or did not end in time.

    Its attribute `rank` is the first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message, rank=rank)

    def _render_traceback_(self) -> list[str]:
        """Shows IPython the frames of the rank, and none of the call that waited."""
        return f"{type(self).__name__}: {self}".splitlines()


class AuditError(ShardcoreError, RuntimeError):
    """An audited step differs from the captured one: its Python read what no guard compares."""


class PluginError(ShardcoreError, TypeError):
    """A plug-in whose offer does not match the hook's specification."""


class PolicyError(ShardcoreError, ValueError):
    """A policy that does not exist, or that cannot plan this model on this mesh."""


class MachineError(ShardcoreError, ValueError):
    """A description of a machine that does not exist or is invalid."""


class CheckpointError(ShardcoreError, ValueError):
    """A checkpoint that is missing, incomplete or damaged, or that does not fit the model."""


def mark_shared(error: Exception) -> Exception:
    """Marks an error that all ranks raise together, and returns it.

    Example:
        >>> is_shared(mark_shared(OSError("disk full"))), is_shared(OSError("disk full"))
        (True, False)
    """
    error.is_shared_by_ranks = True  # type: ignore[attr-defined]
    return error


def is_shared(error: Exception) -> bool:
    """Tells whether all ranks raise this error: no rank has to tell the others of it."""
    return getattr(error, "is_shared_by_ranks", False)


def name_file(error: OSError, path: str) -> None:
    """Adds the path of the file to an error of a write, which has none; not to one of another rank.

    Example:
        >>> error = OSError(27, "File too large")
        >>> name_file(error, "log.csv")
        >>> str(error)
        "[Errno 27] File too large: 'log.csv'"
    """
    if error.errno is not None and error.filename is None and not is_shared(error):
        error.filename = path
