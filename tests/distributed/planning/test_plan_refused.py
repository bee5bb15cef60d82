"""`shardcore.plan`: what is refused, and what is not."""

import keras
import pytest
from keras import layers

import shardcore
from shardcore.domain.errors import PolicyError, RuleError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import run_ranks
from tests.distributed.planning.planned import MESH, X, build, in_a_process, plan, use
from tests.distributed.programs import assert_fails_everywhere


def unbuilt():
    return keras.Sequential([layers.Dense(2)])


def distributed():
    devices = keras.distribution.DeviceMesh((1,), ("batch",), ["cpu:0"])
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=devices))
    return build()


def reading():
    model = build()
    model.set_weights(model.get_weights())
    return model


REFUSED = [
    (
        unbuilt,
        MESH,
        r"what unbuilt\(\) returned, 'sequential', is not built, so it has no variables",
    ),
    (dict, MESH, r"what dict\(\) returned is dict, expected a Keras model"),
    ("model.keras", MESH, "a built Keras model or a function that builds one, got 'model.keras'"),
    (reading, MESH, r"reading\(\) was called .* and reads values of a variable of shape \(8, 32\)"),
    (build, (2, 4), r"for a keras.distribution.DeviceMesh, or, .*; got \(2, 4\)"),
    (build, Mesh((8,), ("batch",)), r"needs an axis beside that of the batch"),
]


def test_an_error_says_why_a_model_cannot_be_planned():
    def program():
        shardcore.install()
        for model, mesh, message in REFUSED:
            with pytest.raises(PolicyError, match=message):
                plan(model, mesh)
            assert keras.distribution.distribution() is None

    in_a_process(program)


def data_parallel():
    """Keras lists the devices for the distribution."""
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return build()


@pytest.mark.parametrize("function", [distributed, data_parallel])
def test_a_distribution_that_the_function_sets_is_passed_over(function):
    def program():
        message = rf"{function.__name__}\(\) sets a distribution.*: call shardcore.install"
        with pytest.raises(PolicyError, match=message):
            plan(function, MESH)
        shardcore.install()
        planned = plan(function, MESH).to_dict() == plan(build, MESH).to_dict()
        return planned, keras.distribution.distribution()

    assert in_a_process(program) == (True, None)


def test_an_error_of_the_function_is_its_own():
    def failing():
        raise KeyError("width")

    def program():
        with pytest.raises(KeyError, match="width"):
            plan(failing)

    in_a_process(program)


def test_a_model_with_other_names_than_the_plan_is_refused_on_all_ranks():
    def program(rank):
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        use(plan(build(), mesh), build)  # Keras counts on: this is another model

    assert_fails_everywhere(
        program, 2, error=RuleError,
        match="No rule of the plan .*made for sequential/dense/kernel.*has sequential_1/dense_2/k",
    )  # fmt: skip


def test_a_model_that_has_some_of_the_variables_and_others_is_not_refused():
    def program(rank):
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        model = use(plan(build, mesh), build)
        other = keras.Model(model.inputs, layers.Dense(3)(model.layers[0].output))
        return other.predict_on_batch(X).shape

    assert run_ranks(program, 2) == [(4, 3)] * 2
