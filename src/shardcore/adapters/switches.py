"""Environment variables that turn something on or off."""

import os

from shardcore.domain.errors import EnvironmentProblem


def is_on(variable: str, *, default: bool) -> bool:
    """Returns whether the environment variable is "1", or `default` if it is not set.

    Raises:
        EnvironmentProblem: If it is neither "1" nor "0".

    Example:
        >>> is_on("A_VARIABLE_THAT_IS_NOT_SET", default=True)
        True
    """
    asked = os.environ.get(variable, str(int(default)))
    if asked not in ("0", "1"):
        raise EnvironmentProblem(
            f"Expected {variable} to be 1 or 0, got {asked!r}. Unset it for {default:d}, or set it "
            f"to {not default:d}."
        )
    return asked == "1"
