"""Layers as people write them: views, writes in place, state of Python, operators, own losses."""

from typing import Any

import keras
import torch

ops = keras.ops


class OwnLayer(keras.layers.Layer):
    """A layer of several variants, with the shape of its input.

    Args:
        variant: Chooses the variant.
        size: A number that some variants take.
        scale: An attribute of Python, which a program may change between steps.
    """

    def __init__(self, variant: int = 0, size: int = 4, scale: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.variant, self.size, self.scale = variant, size, scale

    def get_config(self) -> dict[str, Any]:
        own = {"variant": self.variant, "size": self.size, "scale": self.scale}
        return {**super().get_config(), **own}

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


@keras.saving.register_keras_serializable("fuzz")
class InPlace(OwnLayer):
    """Writes into copies of its input and into their views, as torch allows."""

    def call(self, x: Any) -> Any:
        y = x * self.scale
        match self.variant:
            case 0:
                y[:, 0] = 0.5
            case 1:
                y[..., ::2] += 1
            case 2:
                y.narrow(-1, 0, 1).mul_(3)
            case 3:
                y.transpose(0, 1).add_(x.transpose(0, 1))
            case 4:
                y[..., : x.shape[-1] // 2 + 1].tanh_()
            case _:
                y.reshape(-1)[:2] = 0.25
        return y


@keras.saving.register_keras_serializable("fuzz")
class Views(OwnLayer):
    """Looks at its input and at its weight in other shapes."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2 * shape[-1]), name="kernel")

    def call(self, x: Any) -> Any:
        width = x.shape[-1]
        kernel = ops.convert_to_tensor(self.kernel)
        match self.variant:
            case 0:
                return x @ kernel[:, :width]
            case 1:
                return x @ kernel.T[width:]
            case 2:
                return x + kernel.reshape(2, -1).sum(0)[:width]
            case 3:
                left, right = torch.split(kernel, width, dim=1)
                return x @ left - x * right.mean(0)
            case 4:
                return (x.unsqueeze(-2) * kernel.unfold(1, width, width)[0, 0]).squeeze(-2)
            case _:
                return x.flatten(1).view(x.shape) * kernel.diagonal()[:width]


@keras.saving.register_keras_serializable("fuzz")
class Counts(OwnLayer):
    """Keeps state in variables that `call` assigns, and in attributes of Python."""

    def build(self, shape: Any) -> None:
        zeros = {"initializer": "zeros", "trainable": False}
        self.calls = self.add_weight(shape=(), name="calls", dtype="int32", **zeros)
        self.mean = self.add_weight(shape=(shape[-1],), name="mean", **zeros)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
            rows = ops.mean(ops.reshape(x, (-1, x.shape[-1])), axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.stop_gradient(rows))
        match self.variant:
            case 0:
                return x - self.mean
            case 1:
                return x * self.scale + ops.cast(self.calls, x.dtype)
            case 2 if self.scale > 1:
                return ops.relu(x) - self.mean
            case 3:
                return ops.cond(self.calls > 2, lambda: x * 2, lambda: x + 1)
            case 4:
                self.add_loss(0.01 * self.scale * ops.mean(ops.square(x)))
                return x
            case _:
                return ops.where(x > self.mean, x, self.scale * 0.1)


@keras.saving.register_keras_serializable("fuzz")
class Operators(OwnLayer):
    """Calls operators of Keras and torch that move numbers between places and rows."""

    def call(self, x: Any) -> Any:
        match self.variant:
            case 0:
                return ops.roll(x, 1, axis=-1) + ops.flip(x, axis=1)
            case 1:
                return ops.cumsum(x, axis=-1) * self.scale
            case 2:
                return ops.sort(x, axis=-1) + x[:, :1]
            case 3:
                return torch.cat([x[..., 1:], x[..., :1]], -1) - x.mean(0, keepdim=True)
            case 4:
                return x / (1 + x.pow(2).sum(0, keepdim=True).sqrt())
            case _:
                index = ops.argmax(x, axis=-1)
                return x * ops.one_hot(index, x.shape[-1], dtype=x.dtype) + torch.logsumexp(
                    x, -1, keepdim=True
                )


@keras.saving.register_keras_serializable("fuzz")
class Nested(OwnLayer):
    """Holds layers in a list; calls one of them twice."""

    def build(self, shape: Any) -> None:
        self.parts = [keras.layers.Dense(self.size, activation="tanh") for _ in range(2)]
        self.back = keras.layers.Dense(shape[-1])
        for part in self.parts:
            part.build(shape)
        self.back.build((*shape[:-1], self.size))

    def call(self, x: Any, training: bool = False) -> Any:
        for number, part in enumerate(self.parts):
            if self.variant % 2 and number and training:
                break
            x = x + self.back(part(x)) * self.scale
        return x
