"""The examples of Keras' guide "Distributed training with Keras", on eight ranks.

The calls of https://keras.io/guides/distribution as it was first published (2023), but for what it
takes from elsewhere: `jax.devices()` is `keras.distribution.list_devices()` here, and the
`tf.data.Dataset` of its data is a torch `DataLoader`. Neither a seed nor anything else is set: the
ranks draw the same data. The edition of 2026, which trains nothing, is at the end.
"""

import keras
import numpy as np
import pytest
import torch
from keras import layers

import shardcore
from shardcore.testing import run_ranks

RANKS = 8


def guide_devices():
    return keras.distribution.list_devices()


def guide_dataset():
    inputs = np.random.normal(size=(128, 28, 28, 1))
    labels = np.random.normal(size=(128, 10))
    tensors = torch.utils.data.TensorDataset(torch.tensor(inputs), torch.tensor(labels))
    return torch.utils.data.DataLoader(tensors, batch_size=16)


def device_mesh_and_tensor_layout(devices):
    mesh = keras.distribution.DeviceMesh(
        shape=(2, 4), axis_names=["data", "model"], devices=devices
    )

    layout_2d = keras.distribution.TensorLayout(axes=("model", "data"), device_mesh=mesh)

    replicated_layout_4d = keras.distribution.TensorLayout(
        axes=("data", None, None, None), device_mesh=mesh
    )
    return layout_2d, replicated_layout_4d


def data_parallel(devices):
    data_parallel = keras.distribution.DataParallel(devices=devices)

    mesh_1d = keras.distribution.DeviceMesh(shape=(8,), axis_names=["data"], devices=devices)
    data_parallel = keras.distribution.DataParallel(device_mesh=mesh_1d)

    dataset = guide_dataset()

    keras.distribution.set_distribution(data_parallel)

    inputs = layers.Input(shape=(28, 28, 1))
    y = layers.Flatten()(inputs)
    y = layers.Dense(units=200, use_bias=False, activation="relu")(y)
    y = layers.Dropout(0.4)(y)
    y = layers.Dense(units=10, activation="softmax")(y)
    model = keras.Model(inputs=inputs, outputs=y)

    model.compile(loss="mse")
    history = model.fit(dataset, epochs=3)
    return model, history.history["loss"], model.evaluate(dataset)


def model_parallel(devices):
    mesh_2d = keras.distribution.DeviceMesh(
        shape=(2, 4), axis_names=["data", "model"], devices=devices
    )
    layout_map = keras.distribution.LayoutMap(mesh_2d)
    layout_map["d1/kernel"] = (None, "model")
    layout_map["d1/bias"] = ("model",)

    layout_map["d2/output"] = ("data", None)

    model_parallel = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")

    dataset = guide_dataset()
    keras.distribution.set_distribution(model_parallel)

    inputs = layers.Input(shape=(28, 28, 1))
    y = layers.Flatten()(inputs)
    y = layers.Dense(units=200, use_bias=False, activation="relu", name="d1")(y)
    y = layers.Dropout(0.4)(y)
    y = layers.Dense(units=10, activation="softmax", name="d2")(y)
    model = keras.Model(inputs=inputs, outputs=y)

    model.compile(loss="mse")
    history = model.fit(dataset, epochs=3)
    return model, history.history["loss"], model.evaluate(dataset)


def test_device_mesh_and_tensor_layout():
    def program(rank):
        shardcore.install()
        layout_2d, layout_4d = device_mesh_and_tensor_layout(guide_devices())
        matrix = keras.distribution.distribute_tensor(np.arange(32.0).reshape(8, 4), layout_2d)
        images = keras.distribution.distribute_tensor(np.zeros((6, 5, 5, 1)), layout_4d)
        return matrix.to_local().tolist(), tuple(images.to_local().shape)

    blocks = np.arange(32.0).reshape(4, 2, 2, 2).swapaxes(1, 2)  # by "model", then by "data"
    for rank, (local, image) in enumerate(run_ranks(program, RANKS, init=False)):
        data, model = divmod(rank, 4)
        assert local == blocks[model, data].tolist()
        assert image == (3, 5, 5, 1)


# Keras says so of every DataLoader.
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_training():
    def program(rank):
        shardcore.install()
        found = []
        for example in (data_parallel, model_parallel):
            keras.utils.clear_session()
            model, losses, loss = example(guide_devices())
            report = shardcore.verify(model)
            found.append((report.variables[0].local_shape, report.ok, losses, loss))
        return found

    results = run_ranks(program, RANKS, init=False, timeout=240)
    assert all(result == results[0] for result in results)
    for kernel, (shape, ok, losses, loss) in zip([(784, 200), (784, 50)], results[0], strict=True):
        assert (shape, ok) == (kernel, True)
        # Labels of variance 1 and predictions about 0.1: the loss is about 1, and gets smaller.
        assert 1.3 > losses[0] > losses[-1] > 0.7
        assert loss == pytest.approx(losses[-1], rel=0.1)


def test_the_edition_of_2026():
    def program(rank):
        shardcore.install()
        keras.distribution.initialize()
        mesh = keras.distribution.DeviceMesh(
            (2, 4), ["data", "model"], keras.distribution.list_devices()
        )
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        model = keras.Sequential([layers.Input((28, 28, 1)), layers.Flatten(), layers.Dense(10)])
        model.compile(loss="mse", optimizer="adam")
        model.summary(print_fn=lambda text: None)

        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map["d1/kernel"] = (None, "model")
        layout_map["d2/output"] = ("data", None)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
        )
        model = keras.Sequential(
            [layers.Input((784,)), layers.Dense(200, name="d1"), layers.Dense(10, name="d2")]
        )
        model.summary(print_fn=lambda text: None)
        return tuple(model.layers[0].kernel.value.to_local().shape), shardcore.rules_report(model)

    for shape, report in run_ranks(program, RANKS, init=False):
        # In a Sequential the path is "sequential/d1/kernel", so that edition's rule shards nothing,
        # on any backend. Here the report names it.
        assert shape == (784, 200)
        assert "d1/kernel" in report.unused_rules
