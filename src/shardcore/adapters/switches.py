"""Environment variables that turn something on or off, or choose one of a few values."""

import os
from collections.abc import Sequence

from shardcore.domain.errors import EnvironmentProblem


def chosen(variable: str, values: Sequence[str], default: str) -> str:
    """Reads the environment variable; `default` if it is not set.

    Raises:
        EnvironmentProblem: If it is none of `values`.

    Example:
        >>> chosen("A_VARIABLE_THAT_IS_NOT_SET", ("1", "0"), "0")
        '0'
    """
    setting = os.environ.get(variable, default)
    if setting not in values:
        raise EnvironmentProblem(
            f"Expected {variable} to be {', '.join(values[:-1])} or {values[-1]}, got {setting!r}. "
            f"Unset it for {default}.",
            got=repr(setting),
        )
    return setting


def is_on(variable: str, *, default: bool) -> bool:
    """Reads an environment variable that is "1" or "0"; `default` if it is not set.

    Raises:
        EnvironmentProblem: If it is neither "1" nor "0".

    Example:
        >>> is_on("A_VARIABLE_THAT_IS_NOT_SET", default=True)
        True
    """
    return chosen(variable, ("1", "0"), str(int(default))) == "1"
