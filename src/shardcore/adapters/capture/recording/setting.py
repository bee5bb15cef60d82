"""The environment variable `SHARDCORE_CAPTURE`."""

import os
import re

import attrs

from shardcore.domain.errors import EnvironmentProblem

_VARIABLE = "SHARDCORE_CAPTURE"
_USUAL_INTERVAL = 10


@attrs.frozen
class CaptureSetting:
    """The wishes of a user about captured steps.

    Args:
        at_once: Whether steps are recorded from the first one on, whether it pays or not.
        audit_interval: One in so many captured steps is audited; 0 if none is.
    """

    at_once: bool = False
    audit_interval: int = 0

    @classmethod
    def of_environment(cls) -> "CaptureSetting":
        """Returns the setting that `SHARDCORE_CAPTURE` asks for.

        Raises:
            EnvironmentProblem: If it has another value than "", "at-once", "audit" or "audit:5".
        """
        asked = os.environ.get(_VARIABLE, "")
        if asked in ("", "at-once"):
            return cls(at_once=bool(asked))
        match = re.fullmatch(r"audit(?::([1-9]\d*))?", asked)
        if match is None:
            raise EnvironmentProblem(
                f'{_VARIABLE} is {asked!r}. Set it to "at-once", which records steps from the '
                f'first one on; to "audit", which audits one captured step in {_USUAL_INTERVAL}; '
                'or to "audit:1", which audits all; or unset it.'
            )
        return cls(at_once=True, audit_interval=int(match.group(1) or _USUAL_INTERVAL))
