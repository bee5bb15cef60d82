"""Reads of functions, of what a class gets later, of patterns and of your own operators."""

import collections.abc
import sys
import types

import keras
import torch


class Rates:
    gain = 1.0


def scaled(x):
    return x * Rates.gain


OPERATORS = torch.library.Library("of_a_test", "DEF")
OPERATORS.define("scaled(Tensor x) -> Tensor")
OPERATORS.impl("scaled", scaled, "CompositeImplicitAutograd")


def another_namespace_of_a_function():
    def scale():
        return scale.factor

    scale.factor = 1.0

    def change():
        scale.__dict__ = {"factor": 2.0}

    return scale, change


def an_attribute_of_a_function_of_keras():
    relu = keras.ops.relu
    relu.gain_of_a_test = 1.0
    return (
        lambda: keras.ops.relu.gain_of_a_test,
        lambda: setattr(relu, "gain_of_a_test", 2.0),
        lambda: delattr(relu, "gain_of_a_test"),
    )


def the_defaults_of_a_function_of_torch():
    leaky, defaults = torch.nn.functional.leaky_relu, torch.nn.functional.leaky_relu.__defaults__
    return (
        lambda: -float(torch.nn.functional.leaky_relu(torch.full((), -1.0))),
        lambda: setattr(leaky, "__defaults__", (0.5, False)),
        lambda: setattr(leaky, "__defaults__", defaults),
    )


def a_new_attribute_of(kind):
    def read():
        return getattr(kind, "gain_of_a_test", 1.0)

    def make():
        change = lambda: setattr(kind, "gain_of_a_test", 2.0)  # noqa: E731
        return read, change, lambda: delattr(kind, "gain_of_a_test")

    make.__name__ = f"a_new_attribute_of_{kind.__name__}"
    return make


def a_new_method_of_tensors():
    def read():
        x = torch.ones(())
        return 2.0 if hasattr(x, "doubled_of_a_test") else 1.0

    return (
        read,
        lambda: setattr(torch.Tensor, "doubled_of_a_test", lambda x: 2 * x),
        lambda: delattr(torch.Tensor, "doubled_of_a_test"),
    )


def a_sequence_that_is_registered():
    class Pair:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return [2.0][index]

    pair = Pair()

    def read():
        match pair:
            case [gain]:
                return gain
        return 1.0

    return read, lambda: collections.abc.Sequence.register(Pair)


def a_part_of_a_package_that_is_replaced():
    package = types.ModuleType("package_of_a_test")
    package.__path__ = []
    parts = [types.ModuleType("package_of_a_test.part") for _ in range(2)]
    for gain, part in enumerate(parts, start=1):
        part.gain = float(gain)
    sys.modules |= {"package_of_a_test": package, "package_of_a_test.part": parts[0]}

    def read():
        from package_of_a_test import part

        return part.gain

    return read, lambda: sys.modules.__setitem__("package_of_a_test.part", parts[1])


def your_own_operator():
    def change():
        Rates.gain = 2.0

    def undo():
        Rates.gain = 1.0

    return lambda: torch.ops.of_a_test.scaled(torch.ones(())), change, undo


SEEN = (
    another_namespace_of_a_function,
    an_attribute_of_a_function_of_keras,
    the_defaults_of_a_function_of_torch,
    a_new_attribute_of(keras.layers.Layer),
    a_new_attribute_of(torch.nn.Module),
    a_new_method_of_tensors,
    a_sequence_that_is_registered,
    a_part_of_a_package_that_is_replaced,
    your_own_operator,
)
REFUSED = ()
