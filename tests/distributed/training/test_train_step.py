"""Steps that users override, and how steps are run: the numbers of one device."""

import keras
import numpy as np
import torch

from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close, distribute

RNG = np.random.default_rng(0)
X = RNG.normal(size=(14, 12)).astype("float32")
Y = keras.utils.to_categorical(RNG.integers(0, 4, 14), 4)
RULES = {".*first/kernel": (None, "model"), ".*second/kernel": ("model", None)}
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)


def layers():
    x = keras.Input((12,))
    h = keras.layers.Dense(16, "relu", name="first")(x)
    h = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3)(h))
    return x, keras.layers.Dense(4, name="second")(h)


class Penalized(keras.Model):
    """A gradient of a gradient, a host read that decides, logs of every kind."""

    def train_step(self, data):
        x, y = data
        x = (x + 0.0).requires_grad_()
        outputs = self(x, training=True)
        inferred = self(x, training=False).sum()
        (slope,) = torch.autograd.grad(inferred, [x], create_graph=True)
        loss = LOSS(y, outputs) + (slope.square().sum(1).sqrt() - 1).square().mean()
        self.zero_grad()
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_variables]
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
        if norm > 0.5:
            gradients = [gradient * (0.5 / norm) for gradient in gradients]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": float(norm), "rows": y.shape[0]}

    def test_step(self, data):
        x, y = data
        return {"worst": keras.ops.max(keras.ops.abs(y - self(x, training=False)))}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(x, training=False)
        return {"outputs": outputs, "class": keras.ops.argmax(outputs, axis=-1)}


class WithLosses(keras.Model):
    """Its own loss, metric and call."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        weights = sum(keras.ops.sum(v * v) for v in self.trainable_variables)
        return loss + 0.1 * keras.ops.mean(keras.ops.abs(y_pred)) + 1e-3 * weights

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"largest": keras.ops.max(y_pred)}

    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training) * 2.0


class OfTorch(keras.Model):
    """A step with an optimizer of torch."""

    def train_step(self, data):
        x, y = data
        if not hasattr(self, "torchs"):
            parameters = [p for p in self.parameters() if p.requires_grad]
            self.torchs = torch.optim.Adam(parameters, 0.01, eps=1e-3)
        loss = LOSS(y, self(x, training=True))
        self.torchs.zero_grad()
        loss.backward()
        self.torchs.step()
        return {"loss": loss.item()}


class Generated(keras.Model):
    """Two models, two optimizers, random input; it is neither functional nor given targets."""

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential([keras.Input((3,)), dense(8, name="first"), dense(12)])
        self.judge = keras.Sequential([keras.Input((12,)), dense(8, name="first"), dense(1)])
        self.optimizers = [keras.optimizers.Adam(0.01, epsilon=1e-3) for _ in range(2)]
        self.seeds = keras.random.SeedGenerator(1)
        self.built = True

    def learn(self, model, optimizer, loss):
        self.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply(
                [v.value.grad for v in model.trainable_weights], model.trainable_weights
            )

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        rows, ops = x.shape[0], keras.ops
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        drawn = self.generator(keras.random.normal((rows, 3), seed=self.seeds))
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
        judged = loss(labels, self.judge(ops.concatenate([drawn, x])))
        self.learn(self.judge, self.optimizers[0], judged)
        drawn = self.generator(keras.random.normal((rows, 3), seed=self.seeds))
        fooled = loss(ops.zeros((rows, 1)), self.judge(drawn))
        self.learn(self.generator, self.optimizers[1], fooled)
        return {"judged": judged, "fooled": fooled}


def fitted(model, found, name, **options):
    """Trains, and adds what came of it to `found`."""
    options = {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3), "loss": LOSS} | options
    model.compile(**options)
    data = {"x": X} if isinstance(model, Generated) else {"x": X, "y": Y}
    results = {"fit": model.fit(**data, batch_size=8, verbose=0).history}
    if not isinstance(model, Generated):
        results["evaluate"] = model.evaluate(**data, batch_size=8, verbose=0, return_dict=True)
        results["predict"] = model.predict(X, batch_size=8, verbose=0)
    results["weights"] = model.get_weights()
    found |= {f"{name} {path}": leaf for path, leaf in keras.tree.flatten_with_path(results)}


def train(rank, mesh):
    if mesh:
        distribute(mesh, RULES)
    found = {}
    for kind in (Penalized, WithLosses, OfTorch):
        keras.utils.set_random_seed(1)
        fitted(kind(*layers()), found, kind.__name__)
    keras.utils.set_random_seed(1)
    fitted(Generated(), found, "Generated", loss=None)
    keras.utils.set_random_seed(1)
    fitted(keras.Model(*layers()), found, "eager", metrics=["accuracy"], run_eagerly=True)
    return found


def test_an_overridden_step_gives_the_numbers_of_one_device():
    (reference,) = run_ranks(train, 1, None)
    for mesh in [(2, 1), (1, 2)]:
        assert_close(run_ranks(train, 2, mesh, timeout=150), reference, atol=2e-5)
