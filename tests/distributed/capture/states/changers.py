"""Code of the user that runs between two steps of `fit`, and changes what the next one reads.

Each function gets what to call for the change, and returns what `fit` gets, and a change of the
model. Where a step knows that no code of the user ran, it need not compare its state.
"""

import contextlib
import io
import signal
import threading
import time

import keras
import numpy as np
import torch

ROWS, BATCH, EPOCHS, LATE = 16, 4, 6, 18  # the change comes in the fifth epoch, in its third step
WAITING = 200  # epochs for a thread or a signal, which come when they come


def data():
    rng = np.random.default_rng(1)
    return [rng.normal(size=(ROWS, columns)).astype("float32") for columns in (3, 1)]


class Late:
    """Calls a function once, at the n-th call; it takes any arguments."""

    def __init__(self, function, at=LATE):
        self.function, self.at, self.count = function, at, 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.count == self.at:
            self.function()


class Calls(keras.callbacks.Callback):
    def __init__(self, **methods):
        super().__init__()
        for name, method in methods.items():
            setattr(self, name, method)


class Stopping(keras.callbacks.EarlyStopping):
    def __init__(self, function):
        super().__init__(monitor="loss", patience=99)
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.function()


def callback_before_a_batch(change):
    return {"callbacks": [Calls(on_train_batch_begin=Late(change))]}


def callback_after_a_batch(change):
    return {"callbacks": [Calls(on_train_batch_end=Late(change))]}


def callback_of_an_epoch(change):
    return {"callbacks": [Calls(on_epoch_begin=Late(change, 5))]}


def callback_of_a_validation(change):
    callback = Calls(on_test_batch_end=Late(change, 4 * 4))
    return {"callbacks": [callback], "validation_data": data(), "validation_batch_size": BATCH}


def lambda_callback(change):
    return {"callbacks": [keras.callbacks.LambdaCallback(on_train_batch_end=Late(change))]}


def lambda_callback_of_an_epoch(change):
    return {"callbacks": [keras.callbacks.LambdaCallback(on_epoch_end=Late(change, 4))]}


def function_of_a_scheduler(change):
    late = Late(change, 5)

    def rate(epoch, now):
        late()
        return now

    return {"callbacks": [keras.callbacks.LearningRateScheduler(rate)]}


def subclass_of_a_callback_of_keras(change):
    return {"callbacks": [Stopping(Late(change, 4))]}


def replaced_method_of_a_callback_of_keras(change):
    callback = keras.callbacks.TerminateOnNaN()
    callback.on_train_batch_end = Late(change)
    return {"callbacks": [callback]}


def monitored_logs(change):
    class Logs(float):
        def __lt__(self, other):
            late()
            return float(self) < float(other)

    late = Late(change, 4)
    stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=99)
    stopping.monitor_op = lambda value, best: bool(Logs(value) < best)
    return {"callbacks": [stopping]}


def generator(change):
    def batches():
        x, y = data()
        late = Late(change)
        while True:
            for start in range(0, ROWS, BATCH):
                late()
                yield x[start : start + BATCH], y[start : start + BATCH]

    return {"x": batches(), "y": None, "batch_size": None, "steps_per_epoch": ROWS // BATCH}


class Batches(keras.utils.PyDataset):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        self.function()
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(values[rows] for values in data())


def dataset_of_keras(change):
    return {"x": Batches(Late(change)), "y": None, "batch_size": None}


class Ends(Batches):
    def on_epoch_end(self):
        self.function()

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(values[rows] for values in data())


def end_of_an_epoch_of_a_dataset(change):
    return {"x": Ends(Late(change, 4)), "y": None, "batch_size": None}


def loader_of_torch(change):
    late = Late(change)

    def collate(rows):
        late()
        return torch.utils.data.default_collate(rows)

    rows = torch.utils.data.TensorDataset(*map(torch.tensor, data()))
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=collate)
    return {"x": loader, "y": None, "batch_size": None}


class Watched(np.ndarray):
    """Its rows are taken by code of the user."""

    function = None

    def __getitem__(self, index):
        if Watched.function is not None:
            Watched.function()
        return np.asarray(super().__getitem__(index))

    def __array__(self, *args, **kwargs):
        return np.asarray(self.view(np.ndarray), *args, **kwargs)


def array_of_the_user(change):
    Watched.function = Late(change)
    return {"x": data()[0].view(Watched)}


def metric_that_is_reset(change):
    class Count(keras.metrics.MeanSquaredError):
        def reset_state(self):
            super().reset_state()
            late()

    late = Late(change, 5)
    return {"metrics": [Count(name="count")]}


def model_that_resets_metrics(change):
    return {"methods": {"reset_metrics": Late(change, 5)}}


def model_that_tests(change):
    late = Late(change, 4)

    def evaluate(model, *args, **kwargs):
        late()
        return keras.Model.evaluate(model, *args, **kwargs)

    return {"class_methods": {"evaluate": evaluate}, "validation_data": data()}


def own_test_step(change):
    late = Late(change, 4 * 4)

    def test_step(model, batch):
        late()
        return keras.Model.test_step(model, batch)

    validation = {"validation_data": data(), "validation_batch_size": BATCH}
    return {"class_methods": {"test_step": test_step}, **validation}


def stream_within_an_epoch(change):
    """The progress bar of Keras writes after each step, on a thread beside the next one."""

    class Stream(io.StringIO):
        def write(self, text):
            return late() or len(text)

    @contextlib.contextmanager
    def scope():
        create = keras.utils.Progbar.__init__
        width, verbose, _, *rest = create.__defaults__
        with contextlib.redirect_stdout(Stream()):
            create.__defaults__ = (width, verbose, 0.0, *rest)
            yield
            create.__defaults__ = (width, verbose, 0.05, *rest)

    late = Late(change, 22)
    return {"verbose": 1, "scope": scope, "batch_size": 1, "epochs": 2}


def thread(change):
    def work():
        time.sleep(0.5)
        change()

    begun = threading.Thread(target=work, daemon=True)
    begun.start()
    return {"epochs": WAITING}


def signal_handler(change):
    signal.signal(signal.SIGALRM, lambda number, frame: change())
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    return {"epochs": WAITING}


def at_once(change):
    change()
    return {"epochs": 1}


CHANGERS = (
    *(callback_before_a_batch, callback_after_a_batch, callback_of_an_epoch),
    *(callback_of_a_validation, lambda_callback, lambda_callback_of_an_epoch),
    *(function_of_a_scheduler, subclass_of_a_callback_of_keras, monitored_logs),
    *(replaced_method_of_a_callback_of_keras, generator, dataset_of_keras),
    *(end_of_an_epoch_of_a_dataset, loader_of_torch, array_of_the_user, metric_that_is_reset),
    *(model_that_resets_metrics, model_that_tests, own_test_step),
)
# When they change it does not depend on the steps.
APART = (thread, signal_handler)
