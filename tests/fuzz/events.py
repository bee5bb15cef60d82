"""Events by name: a program trains its model, predicts, changes it, saves and loads it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch

import shardcore
from tests.fuzz import models
from tests.fuzz.life import CALLBACKS, Life

if TYPE_CHECKING:
    from tests.fuzz.programs import Event


def meet(life: Life, event: "Event") -> None:
    """Does what the event says."""
    life.count += 1
    EVENTS[event.kind](life, event)


def _train(life: Life, event: "Event") -> None:
    for _ in range(event.times + 1):
        logs = life.model.train_on_batch(*life.data(event.batch), return_dict=True)
        life.note(logs, event.kind)


def _test(life: Life, event: "Event") -> None:
    for _ in range(event.times):
        life.note(life.model.test_on_batch(*life.data(event.batch), return_dict=True), event.kind)


def _predict_batches(life: Life, event: "Event") -> None:
    for _ in range(event.times):
        life.note(life.model.predict_on_batch(life.data(event.batch)[0]), event.kind)


def _fit(life: Life, event: "Event") -> None:
    x, y, *weights = life.data(event.rows)
    history = life.model.fit(
        x,
        y,
        sample_weight=weights[0] if weights else None,
        batch_size=event.batch,
        epochs=event.times,
        shuffle=event.value % 2 == 1,
        validation_data=life.data(3) if event.value > 6 else None,
        callbacks=[CALLBACKS[name](life) for name in event.callbacks],
        verbose=0,
    )
    life.note({name: np.array(values) for name, values in history.history.items()}, event.kind)


def _fit_source(life: Life, event: "Event") -> None:
    """Fits batches that do not come from arrays."""
    x, y, *weights = life.data(event.rows)
    arrays = (x, y, *weights)
    cuts = range(0, event.rows, event.batch)
    batches = [tuple(array[cut : cut + event.batch] for array in arrays) for cut in cuts]
    if event.value % 3 == 0:
        source: Any = _endless(batches)
    elif event.value % 3 == 1:
        tensors = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
        source = torch.utils.data.DataLoader(tensors, batch_size=event.batch)
    else:
        source = Batches(batches)
    history = life.model.fit(
        source, steps_per_epoch=len(batches), epochs=event.times, shuffle=False, verbose=0
    )
    life.note({name: np.array(values) for name, values in history.history.items()}, event.kind)


class Batches(keras.utils.PyDataset):
    """Batches of a list."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def _endless(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _evaluate(life: Life, event: "Event") -> None:
    x, y, *weights = life.data(event.rows)
    logs = life.model.evaluate(
        x,
        y,
        sample_weight=weights[0] if weights else None,
        batch_size=event.batch,
        return_dict=True,
        verbose=0,
    )
    life.note(logs, event.kind)


def _predict(life: Life, event: "Event") -> None:
    x = life.data(event.rows)[0]
    life.note(life.model.predict(x, batch_size=event.batch, verbose=0), event.kind)


def _call(life: Life, event: "Event") -> None:
    """Calls the model outside a step."""
    x = life.data(event.rows)[0]
    life.note(life.model(x, training=event.value % 2 == 1), event.kind)


def _set_rate(life: Life, event: "Event") -> None:
    if life.program.optimizer != "scheduled":
        life.model.optimizer.learning_rate = 0.001 * (event.value + 1)


def _set_attribute(life: Life, event: "Event") -> None:
    """Sets an attribute of every layer that has it."""
    name, value = (("scale", 0.5), ("scale", 1.5), ("rate", 0.3), ("momentum", 0.7))[
        event.value % 4
    ]
    for layer in life.model.layers:
        if hasattr(layer, name):
            setattr(layer, name, value)


def _freeze(life: Life, event: "Event") -> None:
    """Freezes a layer or thaws it; every second time the model is compiled again."""
    layer = life.model.layers[1 + event.value % (len(life.model.layers) - 1)]
    layer.trainable = not layer.trainable
    if not life.model.trainable_variables:
        layer.trainable = True
    if event.times % 2:
        models.compile_model(life.model, life.program, life.program.optimizer)


def _compile(life: Life, event: "Event") -> None:
    names = tuple(models.OPTIMIZERS)
    models.compile_model(life.model, life.program, names[event.value % len(names)])


def _assign(life: Life, event: "Event") -> None:
    weights = life.model.trainable_variables
    variable = weights[event.value % len(weights)]
    value = life.draw.normal(0, 0.3, variable.shape).astype(variable.dtype)
    (variable.assign, variable.assign_add, variable.assign_sub)[event.times % 3](value)


def _write(life: Life, event: "Event") -> None:
    """Writes into the tensor of a variable, as code for torch does."""
    weights = life.model.trainable_variables
    value = weights[event.value % len(weights)].value
    with torch.no_grad():
        match event.times:
            case 1:
                value.mul_(0.9)
            case 2:
                value[..., :1] = 0.1
            case 3:
                value.data.clamp_(-0.3, 0.3)
            case _:
                value.copy_(value.detach().flip(0))


def _set_weights(life: Life, event: "Event") -> None:
    weights = life.model.get_weights()
    life.note(weights, event.kind)
    life.model.set_weights(
        [weight * 0.9 if weight.dtype.kind == "f" else weight for weight in weights]
    )


def _save_model(life: Life, event: "Event") -> None:
    """Saves the model, trains, and goes on with the model of the file."""
    path = life.folder / f"{life.count}.keras"
    life.model.save(path)
    _train(life, event)
    life.model = keras.models.load_model(path)


def _save_weights(life: Life, event: "Event") -> None:
    path = life.folder / f"{life.count}.weights.h5"
    life.model.save_weights(path)
    _train(life, event)
    life.model.load_weights(path)


def _checkpoint(life: Life, event: "Event") -> None:
    """Saves a checkpoint, trains, and loads it; plain Keras puts the variables back."""
    _train(life, event)  # so that the optimizer has variables
    if life.is_distributed:
        path = shardcore.save_checkpoint(life.folder / str(life.count), life.model, life.count)
        _train(life, event)
        shardcore.load_checkpoint(path, life.model)
    else:
        values = [keras.ops.convert_to_numpy(variable).copy() for variable in life.state]
        _train(life, event)
        for variable, value in zip(life.state, values, strict=True):
            variable.assign(value)
    life.model.reset_metrics()


def _reset_metrics(life: Life, event: "Event") -> None:
    life.model.reset_metrics()


def _run_eagerly(life: Life, event: "Event") -> None:
    life.model.run_eagerly = True
    _train(life, event)
    life.model.run_eagerly = False


def _add_model(life: Life, event: "Event") -> None:
    """Trains a second model, which shares all layers but the last, and the first in turn."""
    head = keras.layers.Dense(models.CLASSES)(life.model.layers[-2].output)
    twin = keras.Model(life.model.inputs, head)
    models.compile_model(twin, life.program, "SGD")
    for _ in range(event.times):
        for model in (twin, life.model):
            logs = model.train_on_batch(*life.data(event.batch), return_dict=True)
            life.note(logs, event.kind)


EVENTS: dict[str, Callable[[Life, "Event"], None]] = {
    "train": _train,
    "fit": _fit,
    "fit_source": _fit_source,
    "evaluate": _evaluate,
    "predict": _predict,
    "test": _test,
    "predict_batches": _predict_batches,
    "call": _call,
    "set_rate": _set_rate,
    "set_attribute": _set_attribute,
    "freeze": _freeze,
    "compile": _compile,
    "assign": _assign,
    "write": _write,
    "set_weights": _set_weights,
    "save_model": _save_model,
    "save_weights": _save_weights,
    "checkpoint": _checkpoint,
    "reset_metrics": _reset_metrics,
    "run_eagerly": _run_eagerly,
    "add_model": _add_model,
}
