"""Layers in the ways that people write classes: properties, mixins, parts, torch modules."""

import abc
import functools
import typing
import weakref

import keras
import numpy as np
import torch
from keras import ops

Settings = typing.TypeVar("Settings")


class Block(keras.layers.Layer):
    """A dense layer that the subclasses change."""

    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)


def properties():
    class Scaled(Block):
        def __init__(self):
            super().__init__()
            self._rate = 0.5

        @property
        def rate(self):
            return self._rate * self.units

        @functools.cached_property
        def scale(self):
            return 1.0 / np.sqrt(self.units)

        def call(self, inputs):
            return super().call(inputs) * self.rate * self.scale

    return Scaled()


class ScaleMixin:
    scale = 0.5

    def scaled(self, inputs):
        return inputs * self.scale


class ResidualMixin:
    def call(self, inputs):
        outputs = super().call(inputs)
        return outputs + inputs[..., : outputs.shape[-1]]


def mixins_and_super():
    class Mixed(ResidualMixin, ScaleMixin, Block):
        def call(self, inputs):
            outputs = super().call(inputs)
            if isinstance(self, ScaleMixin) and not isinstance(inputs, (list, tuple)):
                outputs = self.scaled(outputs)
            return outputs if issubclass(type(self), ResidualMixin) else outputs + 1.0

    return Mixed()


class Pooling(keras.layers.Layer, abc.ABC):
    def call(self, inputs):
        return self.pooled(ops.relu(inputs))

    @abc.abstractmethod
    def pooled(self, inputs):
        """Returns one number for each row."""


def abstract_base_class():
    class MeanPooling(Pooling):
        def pooled(self, inputs):
            return ops.mean(inputs, axis=-1, keepdims=True)

    return MeanPooling()


class Configured(keras.layers.Layer, typing.Generic[Settings]):
    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings


def generic_layer():
    class Scaled(Configured[dict[str, float]]):
        def call(self, inputs):
            rate = typing.cast("float", self.settings["rate"])
            return inputs * rate

    return Scaled({"rate": 0.5})


def static_and_class_methods():
    class Scaled(Block):
        base = 2.0

        @staticmethod
        def squashed(inputs, limit=3.0):
            return limit * ops.tanh(inputs / limit)

        @classmethod
        def with_units(cls, units):
            return cls(units=units)

        @classmethod
        def rate(cls):
            return 1.0 / cls.base

        def call(self, inputs):
            return self.squashed(super().call(inputs)) * self.rate()

    return Scaled.with_units(3)


def getattr_with_a_default():
    class Scaled(Block):
        def call(self, inputs):
            outputs = super().call(inputs) * getattr(self, "temperature", 0.5)
            return outputs if getattr(self, "skip", None) is None else outputs + self.skip

    return Scaled()


def hasattr_of_an_option():
    class Scaled(Block):
        def __init__(self, norm=True):
            super().__init__()
            if norm:
                self.norm = keras.layers.LayerNormalization()

        def call(self, inputs):
            outputs = super().call(inputs)
            outputs = self.norm(outputs) if hasattr(self, "norm") else outputs
            return outputs * 2.0 if hasattr(self, "doubled") else outputs

    return Scaled()


def except_attribute_error():
    class Scaled(Block):
        def call(self, inputs):
            try:
                rate = self.rate_override
            except AttributeError:
                rate = 0.5
            return super().call(inputs) * rate

    return Scaled()


class Scale:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, inputs):
        return inputs * self.rate

    def __repr__(self):
        return f"Scale({self.rate})"


def callable_object():
    class Scaled(Block):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def call(self, inputs):
            return self.scale(super().call(inputs))

    return Scaled(Scale(0.5))


def weakref_to_the_owner():
    class Part:
        def __init__(self, owner):
            self.owner = weakref.ref(owner)

        def scale(self):
            owner = self.owner()
            return 1.0 if owner is None else owner.units / 8

    class Scaled(Block):
        def __init__(self):
            super().__init__()
            self.part = Part(self)

        def call(self, inputs):
            return super().call(inputs) * self.part.scale()

    return Scaled()


def layers_in_a_list():
    class Stack(keras.layers.Layer):
        def __init__(self, depth=3):
            super().__init__()
            self.blocks = [keras.layers.Dense(6, activation="relu") for _ in range(depth)]
            self.norms = [keras.layers.LayerNormalization() for _ in range(depth)]

        def call(self, inputs, training=None):
            for index, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
                outputs = norm(block(inputs), training=training)
                inputs = inputs + outputs if index else outputs
            return inputs

    return Stack()


def layers_in_a_dict():
    class Heads(keras.layers.Layer):
        def __init__(self, names=("mean", "scale")):
            super().__init__()
            self.heads = {name: keras.layers.Dense(2) for name in names}

        def build(self, input_shape):
            for head in self.heads.values():
                head.build(input_shape)

        def call(self, inputs):
            outputs = {name: head(inputs) for name, head in self.heads.items()}
            return outputs["mean"] * ops.sigmoid(outputs["scale"])

    return Heads()


def linear_of_torch():
    class Linear(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 4)
            self.act = torch.nn.GELU()

        def call(self, inputs):
            return self.act(self.linear(inputs))

        def compute_output_shape(self, input_shape):
            return (*input_shape[:-1], 4)

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(self.compute_output_shape(inputs.shape))

    return Linear()


def wrapped_module_of_torch():
    class Net(torch.nn.Module):
        def __init__(self, width=5, residual=True):
            super().__init__()
            self.first = torch.nn.Linear(6, width)
            self.rest = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(2)])
            self.residual = residual
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, inputs):
            hidden = torch.relu(self.first(inputs))
            for layer in self.rest:
                hidden = layer(hidden) + hidden if self.residual else layer(hidden)
            return hidden * self.scale

    return keras.layers.TorchModuleWrapper(Net(), output_shape=(None, 5))


IDIOMS = (
    *(properties, mixins_and_super, abstract_base_class, generic_layer),
    *(static_and_class_methods, getattr_with_a_default, hasattr_of_an_option),
    *(except_attribute_error, callable_object, weakref_to_the_owner, layers_in_a_list),
    *(layers_in_a_dict, linear_of_torch, wrapped_module_of_torch),
)
