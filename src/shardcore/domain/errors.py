"""Every error that shardcore raises on purpose, under one root."""

_ALLOWED = "\n\t"
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    r"""Returns `text` with a mark for each character that is none to be read.

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


class ShardcoreError(Exception):
    """The root of all errors of this package. Its message may be printed as it is."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class MeshError(ShardcoreError, ValueError):
    """A mesh, an axis name or a rank that is invalid."""


class LayoutError(ShardcoreError, ValueError):
    """A layout that is invalid, or that does not fit its tensor."""


class RuleError(ShardcoreError, ValueError):
    """A path rule that is malformed, or rules that contradict each other."""


class StrategyError(ShardcoreError, RuntimeError):
    """A strategy that does not exist or cannot be used here."""


class EnvironmentProblem(ShardcoreError, RuntimeError):  # noqa: N818, EnvironmentError is Python's
    """The wrong Keras backend, or a missing or unknown version of Keras or torch."""


class RankMismatchError(ShardcoreError, RuntimeError):
    """Ranks differ in a value that must be equal on all of them.

    Attributes:
        waited_in_vain: Whether this rank waited for others that did not come: the ranks are no
            longer at one place of the program.
    """

    def __init__(self, message: str, *, waited_in_vain: bool = False) -> None:
        super().__init__(message)
        self.waited_in_vain = waited_in_vain


class OtherRankFailed(ShardcoreError, RuntimeError):  # noqa: N818 - it says what happened
    """Another rank has failed, or SIGTERM came: this rank ends."""


class RankFailed(ShardcoreError, RuntimeError):  # noqa: N818 - it says what happened
    """A rank that this process started raised, died or did not end in time.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type["RankFailed"], tuple[int, str]]:
        """Returns how it is pickled: a rank may have started ranks itself."""
        return type(self), (self.rank, str(self))

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows: the frames of the rank, and none of the call that waited."""
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
    """Returns whether all ranks raise this error: no rank has to tell the others of it."""
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
