"""Finds the callbacks that read the results of steps."""

import keras

from shardcore.binding.keras_private import read_steps

CALLBACKS = keras.callbacks


class ReadsSteps(CALLBACKS.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class BothBefore(CALLBACKS.Callback):
    def on_test_batch_begin(self, batch, logs=None):
        pass

    def on_batch_begin(self, batch, logs=None):
        pass


class Listed(CALLBACKS.CallbackList):
    pass


def bar(verbose, in_fit=True):
    made = CALLBACKS.ProgbarLogger()
    made.set_params({"verbose": verbose, "epochs": 1, "steps": 1})
    if in_fit:
        made.on_train_begin()
    return made


# A callback, whether it reads the steps of a fit, and those of an evaluate.
READERS = [
    (CALLBACKS.EarlyStopping(), False, False),
    (CALLBACKS.LambdaCallback(on_epoch_end=lambda *_: None), False, False),
    (CALLBACKS.ModelCheckpoint("a.keras"), False, False),
    (CALLBACKS.BackupAndRestore("a"), False, False),
    (bar(2), False, False),
    (bar(1), True, False),
    (bar("auto", in_fit=False), True, True),
    (CALLBACKS.ModelCheckpoint("a.keras", save_freq=3), True, False),
    (CALLBACKS.BackupAndRestore("a", save_freq=3), True, False),
    (CALLBACKS.TerminateOnNaN(), True, False),
    (CALLBACKS.LambdaCallback(on_train_batch_end=lambda *_: None), True, False),
    (ReadsSteps(), True, False),
    (BothBefore(), True, True),
]


def test_callbacks_that_read_the_results_of_steps_are_found():
    for callback, *expected in READERS:
        callbacks = CALLBACKS.CallbackList([callback])
        assert [read_steps(callbacks, phase) for phase in ("train", "test")] == expected, callback
    assert read_steps(Listed([]), "train")
