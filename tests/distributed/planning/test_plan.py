"""`shardcore.plan`: how a plan is made."""

import random

import keras
import numpy as np
import pytest
import torch
from keras import layers

import shardcore
from shardcore.binding.cost.facts import describe
from shardcore.domain.errors import RuleError
from shardcore.testing import run_ranks
from tests.distributed.planning.planned import X, build, in_a_process, plan, use
from tests.distributed.programs import is_seed


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_function_is_called_without_a_trace(is_installed):
    def facts(planned):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        if is_installed:
            shardcore.install()
        before = keras.layers.Dense(1).name  # there is a dense already, and a seed drawn
        keras.random.uniform((2,))
        if planned:
            plan()
        model = build()
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        values = [v.numpy() for v in model.variables]
        paths = [v.path for v in model.variables]
        return before, paths, drawn, keras.random.uniform((3,)).tolist(), values

    first, second = in_a_process(lambda: (facts(False), facts(True)))
    assert first[:4] == second[:4]
    assert len(first[4]) == 5
    for one, other in zip(first[4], second[4], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_layer_that_repeats_heads_is_planned_on_the_meta_device():
    class Repeats(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(2 * shape[-1],), name="scale")

        def call(self, x):
            return keras.ops.repeat(x, 2, axis=-1) * self.scale

    def program():
        x = keras.Input((8,))
        return keras.Model(x, Repeats(name="repeats")(x))

    made = in_a_process(lambda: plan(program).to_dict())
    assert [each["shapes"] for each in made["rules"]] == [((16,),)]


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_model_that_reads_numbers_is_planned_without_memory_for_its_variables(is_installed):
    class Reads(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=shape[-1:], name="scale")
            self.scale.assign(np.ones(shape[-1:]))

        def call(self, x):
            return x * int(keras.ops.max(keras.ops.arange(3))) * self.scale

    def program():
        rate = float(keras.ops.linspace(0.0, 0.5, 3)[1])
        x = keras.Input((1 << 17,))
        wide = layers.Dense(1 << 17, name="wide")  # 64 GiB
        return keras.Model(x, layers.Dropout(rate)(wide(Reads(name="reads")(x))))

    def made():
        if is_installed:
            shardcore.install()
        return plan(program).to_dict()

    shapes = [shape for each in in_a_process(made)["rules"] for shape in each["shapes"]]
    assert sorted(shapes) == [(1 << 17,), (1 << 17,), (1 << 17, 1 << 17)]


class Nested(layers.Layer):
    """Keras builds its layer by a symbolic call."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, x):
        return self.dense(x)


def nested():
    inputs = keras.Input((8,))
    return keras.Model(inputs, Nested()(inputs))


def test_a_function_whose_layers_build_others_is_planned_again_after_it_was_built():
    def program():
        nested()
        return [plan(nested).to_python() for _ in range(2)]

    first, second = in_a_process(program)
    assert first == second


def test_no_rule_is_made_or_missed_for_the_state_of_a_seed_generator():
    def program():
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1,), ("data",))
        chosen = plan(build, mesh, "fully_sharded")
        chosen.distribute()
        model = build()
        seeds = [v.path for v in model.variables if is_seed(v.path)]
        found = shardcore.rules_report(model)
        return seeds, list(chosen), found.unmatched_paths, found.unused_rules

    seeds, keys, unmatched, unused = in_a_process(program)
    assert len(seeds) == 1
    assert not any(map(is_seed, keys))
    assert (unmatched, unused) == ((), ())


def test_nothing_is_allocated_and_the_distribution_stays():
    def program():
        shardcore.install()
        distribution = keras.distribution.DataParallel()
        keras.distribution.set_distribution(distribution)

        def large():
            return keras.Sequential([keras.Input((2**20,)), layers.Dense(2**20, name="petabyte")])

        report = plan(large, policy="fully_sharded").report()
        return report.bytes_full, keras.distribution.distribution() is distribution

    assert in_a_process(program) == (2**42 + 2**22, True)


def test_a_built_model_gives_the_same_plan():
    def program():
        keras.utils.clear_session(free_memory=False)
        model = build()
        keras.utils.clear_session(free_memory=False)
        return dict(plan(model).report().to_dict()), dict(plan().report().to_dict())

    first, second = in_a_process(program)
    assert first == second
    assert [rule["spec"] for rule in first["rules"]][:2] == ["(None, 'model')", "('model',)"]


def test_a_policy_sees_the_graph_and_the_variables():
    def program():
        shared = layers.Dense(4, name="shared")
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(6, name="inside")], name="inner")
        x = keras.Input((4,), name="x")
        h = shared(keras.ops.relu(shared(x)) * 2.0)
        norm = layers.BatchNormalization(axis=1, dtype="float16", name="norm")(h)
        wide = layers.Dense(8, activation=keras.activations.gelu, name="wide")(norm)
        return describe(keras.Model(x, [wide, inner(h)], name="model"))

    facts = in_a_process(program)
    assert set(facts.feeds) == {
        ("x", "shared"), ("shared", "relu"), ("relu", "multiply"), ("multiply", "shared"),
        ("shared", "norm"), ("norm", "wide"), ("shared", "inner"),
    }  # fmt: skip
    assert facts.outputs == ("wide", "inner")
    assert facts.child("inner").feeds[0][1] == facts.child("inner").outputs[0] == "inside"
    assert [facts.child(name).kind for name in ("shared", "relu", "multiply")] == [
        "Dense", "Relu", "Multiply",
    ]  # fmt: skip
    assert facts.child("norm").config["axis"] == -1
    assert facts.child("wide").config["activation"] == "gelu"
    inside = facts.child("inner").child("inside")
    assert (inside.path, inside.input_shape) == ("inner/inside", (None, 4))
    relu = facts.child("relu")  # an operation
    assert (relu.path, relu.output_path, relu.input_shape) == ("", "", None)
    assert facts.child("norm").output_path == "norm/output"
    variables = {each.path: each for each in facts.all_variables()}
    assert len(variables) == len(facts.all_variables()) == 10
    assert variables["shared/kernel"].shape == (4, 4)
    assert (variables["norm/moving_mean"].trainable, variables["shared/bias"].trainable) == (
        False,
        True,
    )
    assert variables["inner/inside/kernel"].bytes == 4 * 6 * 4


def test_a_sequential_from_a_file_is_planned_by_what_loads_it(tmp_path):
    path = tmp_path / "model.keras"

    def load():
        return keras.models.load_model(path)

    def program(rank):
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        use(plan(build, mesh), build).save(path)
        with pytest.raises(RuleError, match="load_model"):
            load().predict(X, verbose=0)
        checks = shardcore.verify(use(plan(load, mesh), load)).variables
        return sorted({check.path for check in checks if check.local_shape != check.shape})

    first, second = run_ranks(program, 2, init=False)
    assert first == second == ["dense/bias", "dense/kernel", "dense_1/kernel"]
