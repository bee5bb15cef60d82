"""Reads of base classes, of classes of the standard library, and of settings."""

import collections
import json
import sys
import typing

import keras
import numpy as np
import torch
from absl import logging


def an_attribute_of_a_base():
    class Base:
        gain = 1.0

    class Config(Base):
        pass

    return lambda: Config.gain, lambda: setattr(Base, "gain", 2.0)


def an_attribute_of_the_base_of_an_object_of_the_step():
    class Base:
        gain = 1.0

    class Config(Base):
        pass

    return lambda: Config().gain, lambda: setattr(Base, "gain", 2.0)


def a_method_of_a_mixin():
    class Mixin:
        def gain(self):
            return 1.0

    class Config(Mixin):
        pass

    return lambda: Config().gain(), lambda: setattr(Mixin, "gain", lambda self: 2.0)


def a_class_method_two_levels_up():
    class Top(typing.Generic[typing.TypeVar("T")]):
        rates: typing.ClassVar = [1.0]

        @classmethod
        def rate(cls):
            return cls.rates[-1]

    class Middle(Top):
        pass

    class Config(Middle):
        pass

    return Config.rate, lambda: Top.rates.append(2.0)


def the_base_of_a_named_tuple():
    class Pair(typing.NamedTuple):
        first: float = 1.0

    class Config(Pair):
        @property
        def rate(self):
            return self.first

    return lambda: Config().rate, lambda: setattr(Pair, "first", property(lambda self: 2.0))


def the_base_of_an_initializer_of_the_step():
    class Base(keras.initializers.Initializer):
        gain = 1.0

        def __call__(self, shape, dtype=None):
            return self.gain * torch.ones(shape)

    class Own(Base):
        pass

    return lambda: Own()((1,)), lambda: setattr(Base, "gain", 2.0)


def a_method_of_the_standard_library():
    default = json.JSONEncoder.default

    def read():
        try:
            return float(json.loads(json.dumps(np.float32(2.0))))
        except TypeError:
            return 1.0

    def change():
        json.JSONEncoder.default = lambda encoder, value: float(value)

    return read, change, lambda: setattr(json.JSONEncoder, "default", default)


def the_most_members_of_a_deque():
    held = collections.deque([1.0])
    return lambda: float(held.maxlen or 1), lambda: held.__init__([1.0], maxlen=5)


def the_function_of_a_property():
    class Config:
        rate = property(lambda self: 1.0)

    config = Config()
    return lambda: config.rate, lambda: Config.__dict__["rate"].__init__(lambda self: 2.0)


def what_is_printed_to():
    rates, before = [1.0], sys.stdout

    class Counts:
        def write(self, text):
            rates[0] = 2.0

        def flush(self):
            pass

    def read():
        print("a line")
        return rates[0]

    return read, lambda: setattr(sys, "stdout", Counts()), lambda: setattr(sys, "stdout", before)


def the_most_epochs_of_keras():
    def change():
        keras.config.set_max_epochs(2)

    return (
        lambda: float(keras.config.max_epochs() or 1),
        change,
        lambda: keras.config.set_max_epochs(None),
    )


def the_verbosity_of_absl():
    before = logging.get_verbosity()
    return (
        lambda: 1.0 + logging.level_debug(),
        lambda: logging.set_verbosity(logging.DEBUG),
        lambda: logging.set_verbosity(before),
    )


def a_setting_of_a_backend_of_torch():
    backend = torch.backends.cudnn
    before = backend.allow_tf32
    return (
        lambda: 1.0 + backend.allow_tf32,
        lambda: setattr(backend, "allow_tf32", not before),
        lambda: setattr(backend, "allow_tf32", before),
    )


SEEN = (
    an_attribute_of_a_base,
    an_attribute_of_the_base_of_an_object_of_the_step,
    a_method_of_a_mixin,
    a_class_method_two_levels_up,
    the_base_of_a_named_tuple,
    the_base_of_an_initializer_of_the_step,
    a_method_of_the_standard_library,
    the_most_members_of_a_deque,
    the_function_of_a_property,
    the_most_epochs_of_keras,
)
REFUSED = (what_is_printed_to, the_verbosity_of_absl, a_setting_of_a_backend_of_torch)
