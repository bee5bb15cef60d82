"""State that functions and classes of C read, which no profile sees: other C code calls them.

Each function returns what reads a number, and what changes it.
"""

import collections
import functools
import io
import itertools
import os
import tempfile
from pathlib import Path

from keras.src.backend.common import global_state


def of_a_file(read):
    """Returns `read(path)` of a file that is not there before the change."""
    path = Path(tempfile.mkdtemp()) / "flag"
    return lambda: 1.0 + read(path), path.touch


def of_a_partial_function_of_c():
    path = Path(tempfile.mkdtemp()) / "flag"
    is_there = functools.partial(os.access, path, os.F_OK)
    return lambda: 1.0 + is_there(), path.touch


def of_map():
    return of_a_file(lambda path: sum(map(os.access, [path], [os.F_OK])))


def of_starmap():
    return of_a_file(lambda path: sum(itertools.starmap(os.access, [(path, os.F_OK)])))


def of_reduce():
    return of_a_file(lambda path: functools.reduce(os.access, [path, os.F_OK]))


def of_a_filter():
    return of_a_file(lambda path: len([*filter(functools.partial(os.access, mode=0), [path])]))


def of_a_function_that_was_looked_up():
    return of_a_file(lambda path: sum(map(getattr(os, "access"), [path], [0])))  # noqa: B009


def of_a_property_of_c():
    class Checked(str):
        __slots__ = ()
        is_there = property(functools.partial(os.access, mode=os.F_OK))

    path = Path(tempfile.mkdtemp()) / "flag"
    checked = Checked(path)
    return lambda: 1.0 + checked.is_there, path.touch


def of_a_factory_of_defaults():
    path = Path(tempfile.mkdtemp()) / "flag"
    is_there = collections.defaultdict(functools.partial(os.access, path, os.F_OK))

    def read():
        is_there.clear()
        return 1.0 + is_there["flag"]

    return read, path.touch


def of_a_file_that_is_iterated_over():
    path = Path(tempfile.mkdtemp()) / "rate"
    path.write_text("1.0")

    def read():
        return sum(float(line) for line in io.FileIO(path))

    return read, lambda: path.write_text("3.0")


def of_a_slot_that_a_method_reads():
    class Slotted:
        __slots__ = ("scale",)

    slotted = Slotted()
    slotted.scale = 1.0
    read_scale = Slotted.scale.__get__
    return lambda: read_scale(slotted), lambda: setattr(slotted, "scale", 3.0)


def of_the_globals_of_a_function():
    def unused():
        pass

    globals()["RATE"] = 1.0
    return lambda: unused.__globals__["RATE"], lambda: globals().update(RATE=3.0)


def of_the_closure_of_a_function():
    rate = 1.0

    def unused():
        return rate

    def change():
        nonlocal rate
        rate = 3.0

    return lambda: unused.__closure__[0].cell_contents, change


def of_the_global_state_of_keras():
    global_state.set_global_attribute("rate", 1.0)
    read = global_state.get_global_attribute
    return lambda: read("rate"), lambda: global_state.set_global_attribute("rate", 3.0)


STATES = [
    value
    for name, value in list(globals().items())
    if name.startswith("of_") and value is not of_a_file
]
