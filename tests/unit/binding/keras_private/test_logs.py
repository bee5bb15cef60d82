"""Logs of steps are as those of the Keras at hand: 3.13 has numbers, and leaves those of users."""

import keras
import pytest
import torch

from shardcore.binding.keras_private import logs_of_step, training


class OwnStep(keras.Model):
    def train_step(self, data):
        return {"loss": torch.tensor(0.5)}


@pytest.mark.parametrize(
    ("line", "model", "kind"),
    [
        ((3, 13), keras.Model, float),
        ((3, 13), OwnStep, torch.Tensor),
        ((3, 14), keras.Model, torch.Tensor),
    ],
)
def test_logs_of_a_step(monkeypatch, line, model, kind):
    monkeypatch.setattr(training, "LINE", line)
    (log,) = logs_of_step(model(), "train_step", {"loss": torch.tensor(0.5)}).values()
    assert (type(log), float(log)) == (kind, 0.5)


def test_predictions_are_no_logs(monkeypatch):
    monkeypatch.setattr(training, "LINE", (3, 13))
    done = {"a": torch.ones(2)}
    assert logs_of_step(keras.Model(), "predict_step", done) is done
