"""Settings of the process that the code of a step may read, and that no attribute holds."""

import abc
import sys
import threading
import time
import warnings
from _abc import _get_dump  # type: ignore[import-not-found]  # a registry has no public name
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from torch.__future__ import get_swap_module_params_on_conversion as swaps_parameters

from shardcore.binding.capture.python_state.objects import is_of

# The names by which code reads the environment. It is compared for such code alone: Inductor and
# other libraries set variables between steps.
READ_ENVIRONMENT = frozenset({"environ", "getenv", "get_exec_path", "getenvb"})


def filters_of_errors() -> list[Any]:
    """Lists the filters by which a warning may become an error: the others decide what is shown.

    Libraries add such others on one rank alone, as loggers do where they are imported.
    """
    filters = list(warnings.filters)
    while filters and filters[-1][0] != "error":
        filters.pop()
    return filters


# Settings of the process that code may read under any name, or that decide whether NumPy raises:
# how to read them, and their title. All together take 3 microseconds.
SETTINGS: tuple[tuple[Callable[[], object], str], ...] = (
    (np.geterr, "NumPy's handling of errors"),
    (filters_of_errors, "the filters of warnings"),
    (sys.get_int_max_str_digits, "the most digits of an integer as text"),
    (lambda: threading.current_thread().name, "the name of this thread"),
    (swaps_parameters, "whether torch swaps parameters"),
    (lambda: (time.timezone, time.altzone, time.tzname), "the time zone"),
)


@attrs.define(eq=False)
class Registrations:
    """Reads which classes are registered with abstract ones, or with subclasses of these.

    Libraries register classes where they are imported, maybe on one rank alone. So the registries
    are compared, but only after Python's counter of registrations has changed.

    Args:
        classes: The abstract classes.
    """

    classes: Sequence[Any]
    _counter: object = attrs.field(default=None, init=False)
    _pairs: frozenset[tuple[int, int]] = attrs.field(default=frozenset(), init=False)

    def __call__(self) -> frozenset[tuple[int, int]]:
        """Reads the identities of each class and of one that is registered with it."""
        counter = abc.get_cache_token()
        if counter != self._counter:
            self._counter, self._pairs = counter, frozenset(self._read())
        return self._pairs

    def _read(self) -> Iterator[tuple[int, int]]:
        left, seen = list(self.classes), set[int]()
        while left:
            kind = left.pop()
            if id(kind) not in seen and is_of(kind, abc.ABCMeta):
                seen.add(id(kind))
                registered = [reference() for reference in _get_dump(kind)[0]]
                yield from ((id(kind), id(other)) for other in registered if other is not None)
                left += [*type.__subclasses__(kind), *registered]
