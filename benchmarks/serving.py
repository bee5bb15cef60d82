"""One rank of a lane: it does what it is asked, and answers."""

import traceback
from collections.abc import Callable
from typing import Any

from attrs import frozen

from benchmarks.training import Training


@frozen
class Failure:
    """The reason why a rank could not answer."""

    report: str


def serve(
    make: Callable[[], Training], receive: Callable[[], list[Any]], send: Callable[[Any], None]
) -> None:
    """Make a training, then call the method that each request names, until there is none.

    Args:
        make: Its end is answered too, by `None`.
        receive: Waits for a request: a name and arguments. An empty one is the last.
        send: Takes what the method gave, or a `Failure`.
    """
    try:
        training = make()
        send(None)
        while request := receive():
            name, *arguments = request
            send(getattr(training, name)(*arguments))
    except BaseException:  # noqa: BLE001 - whatever ends a rank is reported
        send(Failure(traceback.format_exc()))
