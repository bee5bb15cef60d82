"""Reads of Python code without a name that says so, and changes of what they read.

Each function returns what a layer reads in its call, and what changes that before the fifth step.
"""

import copy
import copyreg
import dataclasses
import datetime
import faulthandler
import functools
import inspect
import logging
import os
import reprlib
import sys
import threading
import tracemalloc
import types
import typing
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger as logger_of  # noqa: N813 - another name is the point
from os import getenv as setting
from traceback import format_exc as text_of_error  # noqa: F401 - for its test

import keras
import torch
from keras.src.backend.common import global_state


class Kept:
    """An object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def a_cell():
    value = 1.0
    (cell,) = (lambda: value).__closure__
    return lambda: cell.cell_contents, lambda: setattr(cell, "cell_contents", 2.0)


def a_method_reached_by_super():
    class Base(keras.layers.ReLU):
        pass

    class Own(Base):
        def compute_output_spec(self, *args):
            return super().compute_output_spec(*args)

    own, before = Own(), keras.layers.ReLU.compute_output_spec

    def change():
        keras.layers.ReLU.compute_output_spec = lambda self, *args: 2.0

    keras.layers.ReLU.compute_output_spec = lambda self, *args: 1.0
    return (
        lambda: own.compute_output_spec(0),
        change,
        lambda: setattr(keras.layers.ReLU, "compute_output_spec", before),
    )


def a_method_of_a_layer_of_keras():
    kind = keras.layers.Identity
    layer, before = kind(), kind.call
    return (
        lambda: layer(torch.ones(1)),
        lambda: setattr(kind, "call", lambda self, x: 2 * x),
        lambda: setattr(kind, "call", before),
    )


def a_class_in_a_text():
    class Own:
        pass

    return lambda: len(f"{Own}"), lambda: setattr(Own, "__qualname__", "Another")


def a_function_in_a_text():
    def function():
        pass

    def change():
        function.__qualname__ = "f"

    return lambda: len("%s" % (function,)) % 7, change  # noqa: UP031 - of the old way too


def a_lock_in_a_text():
    lock = threading.Lock()
    return lambda: 1 + ("unlocked" in str(lock)), lock.acquire


def a_lock_of_a_thread_in_a_text():
    lock = threading.RLock()
    return lambda: 1 + ("unlocked" in repr(lock)), lock.acquire


def a_variable_of_the_environment():
    os.environ["OF_A_TEST"] = "1"
    return lambda: float(setting("OF_A_TEST")), lambda: os.environ.update(OF_A_TEST="2")


def a_level_of_a_logger():
    logger_of("of a test").setLevel(10)
    return lambda: logger_of("of a test").level / 10, lambda: logger_of("of a test").setLevel(20)


def a_size_of_an_object():
    values = [1.0]

    def change():
        values.extend(range(99))
        del values[1:]

    return lambda: sys.getsizeof(values), change


def a_global_attribute_of_keras():
    return (
        lambda: global_state.get_global_attribute("of_a_test", 1.0),
        lambda: global_state.set_global_attribute("of_a_test", 2.0),
        lambda: vars(global_state.GLOBAL_STATE_TRACKER).pop("of_a_test", None),
    )


def threads_of_autograd():
    torch.autograd.set_multithreading_enabled(False)
    return (
        lambda: 1 + torch._C._is_multithreading_enabled(),
        lambda: torch.autograd.set_multithreading_enabled(True),
    )


def checks_of_sparse_tensors():
    checks = torch.sparse.check_sparse_tensor_invariants
    return lambda: 1 + checks.is_enabled(), checks.enable, checks.disable


def memory_that_is_traced():
    return lambda: 1 + tracemalloc.is_tracing(), tracemalloc.start, tracemalloc.stop


def a_handler_of_faults():
    faulthandler.disable()
    return lambda: 1 + faulthandler.is_enabled(), lambda: faulthandler.enable(sys.__stderr__)


def a_traceback():
    error = ValueError()

    def change():
        try:
            raise error
        except ValueError:
            pass

    return lambda: 1 + (error.__traceback__ is not None), change


def weak_references():
    kept, references = Kept(), []
    return (
        lambda: 1 + weakref.getweakrefcount(kept),
        lambda: references.append(weakref.ref(kept)),
    )


def a_docstring_of_a_property():
    described = property(lambda self: 1, doc="a")
    return lambda: len(described.__doc__), lambda: setattr(described, "__doc__", "ab")


def methods_that_are_abstract():
    class Own:
        pass

    Own.__abstractmethods__ = frozenset()
    return (
        lambda: 1 + len(Own.__abstractmethods__),
        lambda: setattr(Own, "__abstractmethods__", frozenset("a")),
    )


def shared_memory_of_a_tensor():
    tensor = torch.zeros(2)
    return lambda: 1 + tensor.is_shared(), tensor.share_memory_


def the_number_in_a_name():
    def number():
        return int(keras.layers.ReLU(name=None).name.removeprefix("re_lu").strip("_") or 0)

    first = number()
    return lambda: number() - first, lambda: None


def an_object_that_torch_reads():
    kept = Kept(rate=1.0)

    class Numbers:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return [kept.rate, kept.rate, kept.rate][index]

    numbers = Numbers()
    return lambda: torch.tensor(numbers), lambda: setattr(kept, "rate", 2.0)


def an_index_that_torch_reads():
    kept, values = Kept(index=0), torch.tensor([1.0, 2.0])

    class Index:
        def __index__(self):
            return kept.index

    index = Index()
    return lambda: torch.select(values, 0, index), lambda: setattr(kept, "index", 1)


def fields_of_a_dataclass():
    @dataclasses.dataclass
    class Own:
        a: int = 1
        b: int = 2

    own = Own()
    return (
        lambda: len(dataclasses.fields(own)),
        lambda: Own.__dataclass_fields__.pop("b"),
    )


def annotations():
    class Own:
        a: int

    return (
        lambda: len(typing.get_type_hints(Own)),
        lambda: Own.__annotations__.update(b=int),
    )


def the_order_of_attributes():
    kept = Kept(a=1.0, b=2.0)

    def change():
        del kept.a
        kept.a = 1.0

    return lambda: next(iter(vars(kept).values())), change


def defaults_of_a_tuple():
    pair = namedtuple("pair", "a b", defaults=(1.0, 1.0))
    return lambda: pair().a, lambda: setattr(pair.__new__, "__defaults__", (2.0, 1.0))


def a_method_by_the_type_of_its_operand():
    class Own:
        @functools.singledispatchmethod
        def rate(self, value):
            return 1.0

    own = Own()
    return (
        lambda: own.rate(3),
        lambda: vars(Own)["rate"].register(int, lambda self, value: 2.0),
    )


def how_an_object_is_copied():
    kept = Kept(rate=1.0)
    return (
        lambda: copy.copy(kept).rate,
        lambda: copyreg.pickle(Kept, lambda kept: (Kept.twice, ())),
        lambda: copyreg.dispatch_table.pop(Kept, None),
    )


Kept.twice = staticmethod(lambda: Kept(rate=2.0))


def the_length_of_texts():
    values = list(range(30))
    return (
        lambda: len(reprlib.repr(values)),
        lambda: setattr(reprlib.aRepr, "maxlist", 9),
        lambda: setattr(reprlib.aRepr, "maxlist", 6),
    )


def an_object_of_super():
    class Base:
        def rate(self):
            return self.value

    class Own(Base):
        pass

    own = Own()
    own.value = 1.0
    base = super(Own, own)
    return base.rate, lambda: setattr(own, "value", 2.0)


def a_time_zone_of_the_user():
    class Zone(datetime.tzinfo):
        hours = 1

        def utcoffset(self, moment):
            return datetime.timedelta(hours=self.hours)

    zone = Zone()
    moment = datetime.datetime(2026, 1, 1, tzinfo=zone)
    return (
        lambda: moment.utcoffset().total_seconds() / 3600,
        lambda: setattr(zone, "hours", 2),
    )


def a_namespace_of_a_function():
    space = {"rate": 1.0}
    function = types.FunctionType((lambda: rate).__code__, space)  # noqa: F821 - in `space`
    return function, lambda: space.update(rate=2.0)


def members_of_an_object():
    kept = Kept(a=1.0)
    return lambda: 1 + ("b" in dict(inspect.getmembers(kept))), lambda: setattr(kept, "b", 1)


def a_level_below_another():
    child = logging.getLogger("of a test.below")
    logging.getLogger("of a test").setLevel(10)
    return (
        lambda: child.getEffectiveLevel() / 10,
        lambda: logging.getLogger("of a test").setLevel(20),
    )


def a_result_of_another_thread():
    kept, results = Kept(rate=1.0), []

    def read():
        thread = threading.Thread(target=lambda: results.append(kept.rate))
        thread.start()
        thread.join()
        return results.pop()

    return read, lambda: setattr(kept, "rate", 2.0)


def a_result_of_a_pool():
    kept, pool = Kept(rate=1.0), ThreadPoolExecutor(1)
    return lambda: pool.submit(lambda: kept.rate).result(), lambda: setattr(kept, "rate", 2.0)


REFUSED = (
    *(a_size_of_an_object, threads_of_autograd, checks_of_sparse_tensors, memory_that_is_traced),
    *(a_handler_of_faults, a_traceback, weak_references, methods_that_are_abstract),
    *(shared_memory_of_a_tensor, the_number_in_a_name, annotations),
    *(members_of_an_object, a_result_of_another_thread, a_result_of_a_pool),
)
SEEN = (
    *(
        a_method_of_a_layer_of_keras,
        a_cell,
        a_method_reached_by_super,
        a_class_in_a_text,
        a_function_in_a_text,
    ),
    *(a_lock_in_a_text, a_lock_of_a_thread_in_a_text, a_variable_of_the_environment),
    *(a_level_of_a_logger, a_level_below_another, a_global_attribute_of_keras),
    *(a_docstring_of_a_property, an_object_that_torch_reads, an_index_that_torch_reads),
    *(fields_of_a_dataclass, the_order_of_attributes, defaults_of_a_tuple),
    *(a_method_by_the_type_of_its_operand, how_an_object_is_copied, the_length_of_texts),
    *(an_object_of_super, a_time_zone_of_the_user, a_namespace_of_a_function),
)
