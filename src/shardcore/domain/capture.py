"""Why a step is not captured."""


class NotCaptured(Exception):  # noqa: N818 - it is no error: the step runs eagerly
    """A step cannot be run from a recording. The message says why, and where that is written."""


class StepsDiffer(NotCaptured):
    """Two runs of a step did not do the same; what the first found out once may be the reason."""


class OtherWay(Exception):  # noqa: N818 - it is no error: another program goes that way
    """A step goes another way than the program that was tried, by a number that it has read."""
