"""Programs with the calls of Keras' guides for PyTorch: own loops, own steps, transfer learning.

They are those of one device. The two lines that a user adds are in `distributed`.
"""

import keras
import numpy as np
import pytest
import torch
from keras import layers

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 12)).astype("float32")
LABELS = keras.utils.to_categorical(RNG.integers(0, 5, 32), 5).astype("float32")
IMAGES = RNG.uniform(0, 255, (16, 5, 5, 3)).astype("float32")
IS_CAT = (np.arange(16) % 2).astype("float32")


def loader(x, y):
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=False)


def classifier():
    inputs = keras.Input((12,), name="digits")
    x = layers.Dense(8, activation="relu", name="dense_a")(inputs)
    x = layers.Dense(8, activation="relu", name="dense_b")(x)
    return keras.Model(inputs, layers.Dense(5, name="predictions")(x))


def a_loop_with_a_torch_optimizer():
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = torch.nn.CrossEntropyLoss()
    logged = []
    for _ in range(2):
        for inputs, targets in loader(X, LABELS):
            loss = loss_fn(model(inputs), targets)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            logged.append(loss.detach().numpy())
    return {"losses": logged}


def a_loop_with_metrics_and_validation():
    model = classifier()
    optimizer = keras.optimizers.Adam(learning_rate=1e-2)
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.CategoricalAccuracy()
    found = {"losses": [], "train": [], "validation": []}
    for _ in range(2):
        for inputs, targets in loader(X, LABELS):
            logits = model(inputs, training=True)
            loss = loss_fn(targets, logits)
            model.zero_grad()
            loss.backward()
            gradients = [weight.value.grad for weight in model.trainable_weights]
            with torch.no_grad():
                optimizer.apply(gradients, model.trainable_weights)
            accuracy.update_state(targets, logits)
            found["losses"] += [loss.item(), loss.tolist(), loss.detach().numpy()]
        found["train"].append(float(accuracy.result()))
        accuracy.reset_state()
        with torch.no_grad():
            for inputs, targets in loader(X[:16], LABELS[:16]):
                accuracy.update_state(targets, model(inputs, training=False))
        found["validation"].append(accuracy.result().numpy())
        accuracy.reset_state()
    return found


class CustomModel(keras.Model):
    """A model with its own steps, and its own tracker."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.loss_fn(y, y_pred, sample_weight=weights)
        loss.backward()
        trainable = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in trainable], trainable)
        return self._seen(loss, y, y_pred)

    def test_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        return self._seen(self.loss_fn(y, y_pred, sample_weight=weights), y, y_pred)

    def _seen(self, loss, y, y_pred):
        self.tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def metrics(self):
        return [self.tracker, self.error]


def custom_steps():
    inputs = keras.Input((12,))
    model = CustomModel(inputs, layers.Dense(5)(inputs))
    model.compile(optimizer="adam")
    weights = np.linspace(0.5, 1.5, 32)
    history = model.fit(X, LABELS, sample_weight=weights, batch_size=8, epochs=3, verbose=0).history
    return {
        **history,
        "evaluate": list(model.evaluate(X, LABELS, verbose=0, return_dict=True).values()),
    }


def transfer_learning():
    inner = keras.Sequential(
        [keras.Input((5, 5, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()]
    )
    base = keras.Model(inner.inputs[0], inner.outputs[0])
    base.trainable = False
    assert not inner.layers[0].trainable
    inputs = keras.Input((5, 5, 3))
    x = base(layers.Rescaling(1 / 127.5, offset=-1)(inputs), training=False)
    x = layers.Dropout(0.2, seed=1)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.summary(show_trainable=True, print_fn=lambda text: None)
    found = {}
    for name, rate in (("frozen", 1e-2), ("unfrozen", 1e-3)):
        base.trainable = name == "unfrozen"
        model.compile(
            keras.optimizers.Adam(rate),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy()],
        )
        options = {"batch_size": 8, "epochs": 1, "validation_data": (IMAGES, IS_CAT), "verbose": 0}
        history = model.fit(IMAGES, IS_CAT, **options).history
        found |= {f"{name} {key}": values for key, values in history.items()}
    head = keras.Sequential([layers.Flatten(), layers.Dense(1)])  # on extracted features
    head.compile("sgd", "mse")
    features = base.predict(IMAGES / 255, batch_size=8, verbose=0)
    found["features"] = head.fit(features, IS_CAT, batch_size=8, verbose=0).history["loss"]
    return found


GUIDES = (
    a_loop_with_a_torch_optimizer,
    a_loop_with_metrics_and_validation,
    custom_steps,
    transfer_learning,
)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_runs_unchanged_with_the_numbers_of_one_device(guide):
    def one_device(rank):
        keras.utils.set_random_seed(1)
        return guide()

    def distributed(rank):
        shardcore.install()
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        return one_device(rank)

    (expected,) = run_ranks(one_device, 1)
    assert_close(run_ranks(distributed, 2), expected)
