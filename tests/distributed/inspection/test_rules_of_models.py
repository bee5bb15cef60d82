"""Warnings about the rules of a layout map that several models share, or that nothing matches."""

import logging

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import AXES, distribute


def train(name):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name=name)], name=name)
    model.compile("sgd", "mse")
    for _ in range(2):
        model.train_on_batch(np.ones((2, 4)), np.ones((2, 4)))
    return model


def messages():
    """The warnings about rules from now on."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardcore.rules").addHandler(handler)
    return said


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_a_rule_is_unused_if_no_model_used_it(strategy):
    def program(rank):
        said = messages()
        rules = {
            ".*maker/kernel": (None, "model"),
            ".*judge/kernel": (None, "model"),
            "jugde": ("model",),
        }
        distribute((1, 2), rules, strategy=strategy)
        judge = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="judge")])
        train("maker")
        judge.compile("sgd", "mse")
        judge.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
        return said

    for unused, of_maker, of_judge in run_ranks(program, 2):
        assert "rule 'jugde' matches no variable and no output of the models so far" in unused
        assert "1 of 2 variables of model 'maker' match no rule" in of_maker
        assert "1 of 2 variables of model 'sequential' match no rule" in of_judge


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_a_map_of_which_nothing_matches_is_one_loud_warning(strategy):
    def program(rank):
        said = messages()
        rules = {"dense.*kernel": (None, "model"), "blok/.*": (None, "model")}
        distribute((1, 2), rules, strategy=strategy)
        train("my_dense")
        return said

    for (text,) in run_ranks(program, 2):
        assert "SHARDS NOTHING: no rule ('dense.*kernel', 'blok/.*')" in text
        assert "of model 'my_dense' (my_dense/my_dense/kernel, my_dense/my_dense/bias)" in text
        assert "did you mean '.*dense.*kernel.*'?" in text


class ByShape(keras.distribution.ModelParallel):
    """Shards each matrix, whatever its path."""

    def get_variable_layout(self, variable):
        axes = [None] * len(variable.shape)
        if len(axes) == 2:
            axes[1] = "model"
        return keras.distribution.TensorLayout(axes, self.device_mesh)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_nothing_is_said_where_a_method_of_the_user_decides(strategy):
    def program(rank):
        shardcore.install(strategy)
        said = messages()
        layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1, 2), AXES))
        layout_map["unused"] = ("model",)
        keras.distribution.set_distribution(ByShape(layout_map=layout_map, batch_dim_name="data"))
        kernel = train("dense").layers[0].kernel
        return said, tuple(kernel.value.to_local().shape)

    assert run_ranks(program, 2) == [([], (4, 2))] * 2
