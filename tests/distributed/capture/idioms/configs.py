"""Layers whose settings are held as people hold them: dataclasses, dicts, namespaces."""

import argparse
import dataclasses
import enum
import types
import typing

import attrs
import keras
from keras import ops


class ScaledDense(keras.layers.Layer):
    """A dense layer and a factor, which the subclasses take from their settings."""

    def __init__(self, units=4, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(units)

    def factor(self):
        return 1.0

    def call(self, inputs):
        return self.dense(inputs) * self.factor()


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    units: int = 4
    rate: float = 0.5
    activation: str = "relu"


def frozen_dataclass():
    class Block(keras.layers.Layer):
        def __init__(self, config: FrozenConfig):
            super().__init__()
            self.config = config
            self.dense = keras.layers.Dense(config.units)

        def call(self, inputs):
            hidden = self.dense(inputs) * self.config.rate
            return keras.activations.get(self.config.activation)(hidden)

    return Block(FrozenConfig())


@dataclasses.dataclass
class PlainConfig:
    units: int = 4
    rate: float = 0.5
    use_residual: bool = True

    @property
    def scale(self):
        return self.rate / self.units

    def validate(self):
        if self.units < 1:
            raise ValueError(f"units must be positive, not {self.units}")
        return self


def plain_dataclass():
    class Block(ScaledDense):
        def __init__(self, config):
            super().__init__(config.units)
            self.config = config

        def call(self, inputs):
            self.config.validate()
            outputs = self.dense(inputs) * self.config.scale
            return outputs + inputs[:, :4] if self.config.use_residual else outputs

    return Block(PlainConfig())


@dataclasses.dataclass
class ListConfig:
    rates: list[float] = dataclasses.field(default_factory=lambda: [0.5, 0.25])
    options: dict[str, float] = dataclasses.field(default_factory=dict)


def dataclass_with_default_factory_replaced():
    class Block(ScaledDense):
        def __init__(self, config):
            super().__init__()
            self.config = dataclasses.replace(config, options={"bias": 0.25})

        def factor(self):
            rates = dataclasses.asdict(self.config)["rates"]
            return sum(rates) + self.config.options.get("bias", 0.0)

    return Block(ListConfig())


@attrs.frozen
class HeadConfig:
    heads: int = attrs.field(default=2, validator=attrs.validators.instance_of(int))
    dropout: float = attrs.field(default=0.1, converter=float)


@attrs.define
class BlockConfig:
    head: HeadConfig = attrs.field(factory=HeadConfig)
    depth: int = 2


def attrs_classes():
    class Block(ScaledDense):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def factor(self):
            return self.config.head.heads * (1.0 - self.config.head.dropout) / self.config.depth

    return Block(BlockConfig())


def dict_config():
    class Block(ScaledDense):
        def __init__(self, config):
            super().__init__(config["units"])
            self.config = config

        def factor(self):
            block = self.config["blocks"][0]
            rate = block["rate"] if "rate" in block else block["default"]
            return rate * self.config.get("temperature", 1.0)

    return Block({"units": 4, "blocks": [{"rate": 0.5, "names": ("a", "b")}]})


def simple_namespace():
    class Block(ScaledDense):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def factor(self):
            return self.config.rate * self.config.norm.epsilon

    norm = types.SimpleNamespace(epsilon=0.1, axis=-1)
    return Block(types.SimpleNamespace(rate=0.5, norm=norm))


def argparse_namespace():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--residual", action="store_true")

    class Block(ScaledDense):
        def __init__(self, args):
            super().__init__()
            self.args = args

        def factor(self):
            return self.args.rate + 1.0 if self.args.residual else self.args.rate

    return Block(parser.parse_args(["--residual"]))


class Window(typing.NamedTuple):
    size: int = 4
    stride: int = 2
    weights: tuple[float, ...] = (0.5, 0.25)


def named_tuple_config():
    class Block(ScaledDense):
        def __init__(self, window):
            super().__init__(window.size)
            self.window = window

        def factor(self):
            size, stride, weights = self.window
            return sum(weights) * stride / size

    return Block(Window())


class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"

    @property
    def is_mean(self):
        return self is Mode.MEAN


def enum_mode():
    class Pool(keras.layers.Layer):
        def __init__(self, mode="mean"):
            super().__init__()
            self.mode = Mode(mode)

        def call(self, inputs):
            if self.mode.is_mean:
                return ops.mean(inputs, axis=-1, keepdims=True)
            return ops.sum(inputs, axis=-1, keepdims=True)

    return Pool()


class Bounds:
    __slots__ = ("high", "low")

    def __init__(self, low, high):
        self.low, self.high = low, high


def slots_class():
    class Clip(keras.layers.Layer):
        def __init__(self, bounds):
            super().__init__()
            self.bounds = bounds

        def call(self, inputs):
            return ops.clip(inputs, self.bounds.low, self.bounds.high)

    return Clip(Bounds(-1.0, 1.0))


IDIOMS = (
    *(frozen_dataclass, plain_dataclass, dataclass_with_default_factory_replaced, attrs_classes),
    *(dict_config, simple_namespace, argparse_namespace, named_tuple_config, enum_mode),
    slots_class,
)
