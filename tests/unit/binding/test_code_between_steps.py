"""Code of the user between two steps: where it may run, the guard of a captured step compares."""

import keras
import pytest

from shardcore.binding.keras_private.training import run_no_code_of_users


class Stops(keras.Sequential):
    """Runs code when Keras' loop reads whether to stop."""

    @property
    def stop_training(self):
        return False

    @stop_training.setter
    def stop_training(self, value):
        pass


def callbacks(kind=keras.Sequential):
    model = kind([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watch = keras.callbacks.TerminateOnNaN()
    return keras.callbacks.CallbackList([watch], add_history=True, add_progbar=True, model=model)


def test_callbacks_of_keras_run_no_code_of_users():
    assert run_no_code_of_users(callbacks())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (keras.callbacks.TerminateOnNaN, "on_batch_end"),
        (keras.callbacks.Callback, "on_train_batch_begin"),
        (keras.utils.Progbar, "update"),
        (keras.callbacks.CallbackList, "on_train_batch_end"),
    ],
)
def test_a_replaced_method_of_keras_may(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: None)
    assert not run_no_code_of_users(callbacks())


def test_a_property_of_the_model_that_the_loop_reads_may():
    assert not run_no_code_of_users(callbacks(Stops))
