"""The names of Keras, and programs in a process that no other test sees."""

import pkgutil
import sys

from shardcore.testing import run_ranks


def in_one_process(program, *args):
    """Runs `program(*args)` in a separate process, which no other test sees."""
    return run_ranks(lambda rank: program(*args), 1, init=False)[0]


def keras_names():
    """Every name in Keras' modules and in the classes that they define, and its value."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "keras" or module is None:
            continue
        for key, value in vars(module).items():
            found[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                members = vars(value).items()
                found |= {f"{name}:{key}.{k}": id(v) for k, v in members if k != "__doc__"}
    return found


def holder_of(patch):
    """The module or class that has the name of a patch, and the name in it."""
    module, _, path = patch.place.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def name_of(patch):
    """The name of a patch as in `keras_names`: Keras gives some classes another module."""
    holder, name = holder_of(patch)
    is_class = isinstance(holder, type)
    return f"{holder.__module__}:{holder.__name__}.{name}" if is_class else patch.place
