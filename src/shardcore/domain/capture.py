"""Why a step is not captured."""

from shardcore.domain.errors import ShardcoreError


class NotCaptured(ShardcoreError):  # noqa: N818 - it is no error: the step runs eagerly
    """A step cannot be run from a recording. The message says why, and where that is written."""


class StepsDiffer(NotCaptured):
    """Two runs of a step did not do the same; what the first found out once may be the reason."""


class OtherWay(ShardcoreError):  # noqa: N818 - it is no error: another program goes that way
    """A step goes another way than the program that was tried, by a number that it has read."""
