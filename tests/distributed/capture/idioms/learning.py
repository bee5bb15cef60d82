"""Losses, metrics, schedules, optimizers' parts and models of users, with settings that stay."""

import dataclasses

import keras
import torch
from keras import ops

from tests.distributed.capture.idioms.helpers import scaled_tanh


def network(*layers, model_class=keras.Model):
    inputs = keras.Input((6,))
    outputs = inputs
    for layer in layers or [keras.layers.Dense(4, activation="relu")]:
        outputs = layer(outputs)
    return model_class(inputs, keras.layers.Dense(1)(outputs))


def own_loss_function():
    def focal(gamma=2.0, *, reduction="mean"):
        def loss(y_true, y_pred):
            error = ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred)
            error = ops.power(error, gamma)
            return ops.mean(error, axis=-1) if reduction == "mean" else ops.sum(error, axis=-1)

        return loss

    model = network()
    model.compile("adam", focal(1.5))
    return model


def own_loss_class():
    class Huber(keras.losses.Loss):
        def __init__(self, delta=1.0, name="own_huber", **kwargs):
            super().__init__(name=name, **kwargs)
            self.delta = delta

        def call(self, y_true, y_pred):
            error = y_pred - ops.cast(y_true, y_pred.dtype)
            small = 0.5 * ops.square(error)
            large = self.delta * (ops.abs(error) - 0.5 * self.delta)
            return ops.mean(ops.where(ops.abs(error) <= self.delta, small, large), axis=-1)

    model = network()
    model.compile("sgd", Huber(0.5))
    return model


def own_metric_class():
    class Within(keras.metrics.Metric):
        def __init__(self, tolerance=0.5, name="within", **kwargs):
            super().__init__(name=name, **kwargs)
            self.tolerance = tolerance
            self.hits = self.add_weight(name="hits", initializer="zeros")
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            error = ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred)
            hits = ops.cast(error < self.tolerance, "float32")
            if sample_weight is not None:
                hits = hits * ops.cast(sample_weight, "float32")
            self.hits.assign_add(ops.sum(hits))
            self.count.assign_add(ops.cast(ops.size(hits), "float32"))

        def result(self):
            return ops.divide_no_nan(self.hits, self.count)

    def mean_error(y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred))

    model = network()
    model.compile("sgd", "mse", metrics=[Within(1.0), mean_error, "mae"])
    return model


def own_schedule():
    class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, peak, steps=4, after=None):
            self.peak, self.steps = peak, steps
            self.after = after or keras.optimizers.schedules.ExponentialDecay(peak, 10, 0.9)

        def __call__(self, step):
            step = ops.cast(step, "float32")
            warm = self.peak * (step + 1.0) / self.steps
            return ops.where(step < self.steps, warm, self.after(step))

        def get_config(self):
            return {"peak": self.peak, "steps": self.steps}

    model = network()
    model.compile(keras.optimizers.Adam(WarmUp(0.1), global_clipnorm=1.0), "mse")
    return model


def own_parts_of_a_layer():
    class Orthogonal(keras.regularizers.Regularizer):
        def __init__(self, factor=0.01):
            self.factor = factor

        def __call__(self, weights):
            gram = ops.matmul(ops.transpose(weights), weights)
            return self.factor * ops.sum(ops.square(gram - ops.eye(weights.shape[-1])))

    class Positive(keras.constraints.Constraint):
        def __init__(self, lowest=0.0):
            self.lowest = lowest

        def __call__(self, weights):
            return ops.maximum(weights, self.lowest)

    class Ramp(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            size = 1
            for dim in shape:
                size *= dim
            return ops.reshape(ops.arange(size, dtype=dtype or "float32") / size, shape)

    model = network(
        keras.layers.Dense(
            4,
            activation=scaled_tanh,
            kernel_initializer=Ramp(),
            kernel_regularizer=Orthogonal(),
            bias_constraint=Positive(),
        )
    )
    model.compile("sgd", "mse")
    return model


def subclassed_model():
    class Network(keras.Model):
        def __init__(self, sizes=(6, 4), rate=0.2):
            super().__init__()
            self.blocks = [keras.layers.Dense(size, activation="relu") for size in sizes]
            self.dropout = keras.layers.Dropout(rate, seed=3)
            self.heads = {"out": keras.layers.Dense(1)}

        def embed(self, inputs, training=False):
            for block in self.blocks:
                inputs = block(inputs)
            return self.dropout(inputs, training=training)

        def call(self, inputs, training=False):
            return self.heads["out"](self.embed(inputs, training=training))

    model = Network()
    model.compile("adam", "mse")
    return model


@dataclasses.dataclass
class BackboneConfig:
    hidden_dim: int = 8
    num_layers: int = 2
    epsilon: float = 1e-5


class BackboneBlock(keras.layers.Layer):
    """A block as keras-hub writes it: settings, then layers made in `build`."""

    def __init__(self, hidden_dim, epsilon, dtype=None, **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.hidden_dim, self.epsilon = hidden_dim, epsilon

    def build(self, inputs_shape):
        dtype = self.dtype_policy
        self.norm = keras.layers.LayerNormalization(epsilon=self.epsilon, dtype=dtype, name="norm")
        self.norm.build(inputs_shape)
        self.gate = keras.layers.Dense(self.hidden_dim, activation="silu", dtype=dtype)
        self.gate.build(inputs_shape)
        self.built = True

    def call(self, inputs):
        return inputs + self.gate(self.norm(inputs)) * ops.cast(0.5, self.compute_dtype)

    def get_config(self):
        config = super().get_config()
        config.update({"hidden_dim": self.hidden_dim, "epsilon": self.epsilon})
        return config


def functional_backbone_with_lambda():
    config = BackboneConfig()
    kept = {"hidden_dim": config.hidden_dim, "epsilon": config.epsilon}
    blocks = [BackboneBlock(**kept, name=f"block_{n}") for n in range(config.num_layers)]
    lambdas = keras.layers.Lambda(lambda x, rate=0.5: x * rate, arguments={"rate": 0.25})
    model = network(keras.layers.Dense(config.hidden_dim), *blocks, lambdas)
    model.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.01), "mse")
    return model


def noise_by_a_seed_generator():
    class Noise(keras.layers.Layer):
        def __init__(self, rate=0.1, seed=7):
            super().__init__()
            self.rate = rate
            self.seed_generator = keras.random.SeedGenerator(seed)

        def call(self, inputs, training=False):
            if not training:
                return inputs
            noise = keras.random.normal(ops.shape(inputs), seed=self.seed_generator)
            return inputs + self.rate * noise

    model = network(Noise(), keras.layers.Dense(4))
    model.compile("sgd", "mse")
    return model


def own_train_step():
    class Stepped(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            loss.backward()
            trainable = list(self.trainable_weights)
            gradients = [weight.value.grad for weight in trainable]
            with torch.no_grad():
                self.optimizer.apply(gradients, trainable)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    model = network(model_class=Stepped)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def own_compute_loss():
    class Penalized(keras.Model):
        penalty = 0.01

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            sizes = [ops.sum(ops.square(weight)) for weight in self.trainable_weights]
            return loss + self.penalty * sum(sizes)

    model = network(model_class=Penalized)
    model.compile("sgd", "mse")
    return model


IDIOMS = (
    *(own_loss_function, own_loss_class, own_metric_class, own_schedule, own_parts_of_a_layer),
    *(subclassed_model, functional_backbone_with_lambda, noise_by_a_seed_generator),
    *(own_train_step, own_compute_loss),
)
