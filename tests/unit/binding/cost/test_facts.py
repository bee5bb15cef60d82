"""Facts of a model are data: they can be sent to another process."""

import pickle

import keras
import pytest
from keras import layers

from shardcore.binding.cost.facts import describe


def build(layer):
    return keras.Sequential([keras.Input((4, 3)), layer, layers.Dense(3, "gelu", name="dense")])


@pytest.mark.parametrize(
    "layer",
    [
        layers.LayerNormalization(name="norm"),  # Keras keeps its axes in a TrackedList
        layers.LayerNormalization(axis=[1, 2], name="norm"),
        layers.BatchNormalization(name="norm"),
    ],
)
def test_facts_can_be_pickled(layer):
    facts = describe(build(layer))
    assert pickle.loads(pickle.dumps(facts)) == facts
    assert facts.child("norm").config["axis"] in (-1, (-1,), (1, 2))
