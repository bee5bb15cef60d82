"""Variables: created, assigned and read in their layout, and never kept whole."""

import copy
import io

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import ArgumentProblem, ShardedTensorError
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    DEVICE,
    assert_close,
    assert_fails_everywhere,
    at_place,
    distribute,
    local,
    placements,
)

WHOLE = np.arange(48, dtype="float32").reshape(8, 6)


def variable(spec, value=WHOLE, mesh=(2, 2), **options):
    """A variable at path "v" in layout `spec`."""
    distribute(mesh, {"v": spec})
    return keras.Variable(value, name="v", **options)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_stores_its_part_and_nothing_else(dim):
    def program(rank):
        v = variable(("model", None) if dim == 0 else (None, "model"))
        size = v._value.to_local().untyped_storage().nbytes()
        return local(v), size, placements(v._value)

    for rank, (part, size, placed) in enumerate(run_ranks(program, 4)):
        np.testing.assert_array_equal(part, np.split(WHOLE, 2, dim)[at_place((2, 2), rank)[1]])
        assert (size, placed) == (WHOLE.nbytes // 2, f"R S({dim})")


def test_a_dim_sharded_by_several_axes_is_sharded_by_the_first_one_first():
    def program(rank):
        data_first = variable((("data", "model"), None))
        model_first = variable((("model", "data"), None))
        return [local(v) for v in (data_first, model_first)] + [
            v.numpy() for v in (data_first, model_first)
        ]

    for rank, (data_first, model_first, *wholes) in enumerate(run_ranks(program, 4)):
        data, model = at_place((2, 2), rank)
        np.testing.assert_array_equal(data_first, np.split(WHOLE, 4)[2 * data + model])
        np.testing.assert_array_equal(model_first, np.split(WHOLE, 4)[2 * model + data])
        np.testing.assert_array_equal(wholes, [WHOLE, WHOLE])


def test_an_uneven_dim_falls_as_torch_chunk_cuts_it():
    seven, three = np.arange(7, dtype="float32"), np.arange(3, dtype="float32")

    def program(rank):
        values = []
        for whole in (seven, three):
            v = variable((("data", "model"),), whole)
            v.assign(v + whole)
            values.append((local(v), v.numpy()))
        return values

    for rank, ((part, whole), (small, _)) in enumerate(run_ranks(program, 4)):
        # Sharded by "data", and each half again by "model": 4 = 2 + 2 and 3 = 2 + 1; 2 and 1.
        np.testing.assert_array_equal(part, 2 * seven[[slice(0, 2), slice(2, 4), slice(4, 6),
                                                       slice(6, 7)][rank]])  # fmt: skip
        np.testing.assert_array_equal(whole, 2 * seven)
        assert small.shape == [(1,), (1,), (1,), (0,)][rank]


def test_an_assigned_value_takes_the_layout_whatever_layout_it_has():
    def program(rank):
        v = variable(("model", None))
        stored = v._value
        seen = []
        for value in (
            WHOLE + 1,
            torch.as_tensor(WHOLE + 2),
            shardcore.distribute_tensor(WHOLE + 3, ("model", None)),
            shardcore.distribute_tensor(WHOLE + 4, ("data", "model")),
            v * 2,
        ):
            v.assign(value)
            assert v._value is stored
            assert placements(v._value) == "R S(0)"
            seen.append((local(v), v.numpy()))
        return seen

    for rank, seen in enumerate(run_ranks(program, 4)):
        row = at_place((2, 2), rank)[1]
        for number, (part, whole) in enumerate(seen):
            expected = WHOLE * 2 if number == 4 else WHOLE + number + 1
            np.testing.assert_array_equal(whole, expected)
            np.testing.assert_array_equal(part, expected[4 * row : 4 * row + 4])


def test_integers_scalars_and_what_is_not_trained():
    def program(rank):
        counts = variable(("model",), np.arange(8), dtype="int32", trainable=False)
        scalar = keras.Variable(3.0, name="scalar")
        counts.assign_add(np.ones(8, "int32"))
        scalar.assign(scalar * 2)
        seeds = keras.random.SeedGenerator(1)
        keras.random.normal((2,), seed=seeds)
        return [
            (counts.numpy(), str(counts.dtype), counts._value.requires_grad),
            (placements(counts._value), local(counts).shape),
            (float(scalar.numpy()), placements(scalar._value)),
            (placements(seeds.state._value), seeds.state.numpy()),
        ]

    for (values, dtype, trained), stored, scalar, (seed, _) in run_ranks(program, 4):
        np.testing.assert_array_equal(values, np.arange(8) + 1)
        assert (dtype, trained, stored) == ("int32", False, ("R S(0)", (4,)))
        assert scalar == (6.0, "R R")
        assert seed == "R R"


def mlp():
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    h = shared(keras.layers.Dense(4, name="frozen", trainable=False)(x))
    model = keras.Model(x, keras.layers.Dense(2, name="head")(shared(h)))
    model.compile(keras.optimizers.Adam(0.1, epsilon=1e-3), "mse")
    return model


RULES = {"(frozen|shared)/kernel": (None, "model"), "head/kernel": ("model", None)}
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")


def test_weights_of_a_model_with_a_frozen_and_a_shared_layer():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        model = mlp()
        before = model.get_weights()
        model.set_weights([weight * 2 for weight in before])
        doubled = model.get_weights()
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
        arrays = [keras.ops.convert_to_numpy(v) for v in model.variables]
        values = {"before": before, "doubled": doubled, "after": arrays}
        flat = {f"{n} {i}": v for n, each in values.items() for i, v in enumerate(each)}
        layouts = {v.path: placements(v._value) for v in model.optimizer.variables}
        return flat, layouts

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 4, (2, 2))
    assert_close([values for values, _ in results], reference)
    for values, layouts in results:
        np.testing.assert_array_equal(values["doubled 0"], values["before 0"] * 2)
        np.testing.assert_array_equal(values["after 0"], values["doubled 0"])  # frozen
        assert np.abs(values["after 2"] - values["doubled 2"]).max() > 0.01
        assert layouts["adam/shared_kernel_momentum"] == "R S(1)"
        assert layouts["adam/head_kernel_velocity"] == "R S(0)"
        assert not [path for path in layouts if "frozen" in path]


def test_a_gradient_arrives_in_the_layout_of_its_variable():
    def program(rank):
        distribute((2, 2), RULES)
        model = mlp()
        x, y = shardcore.ensure_dtensor_input((X, Y))
        model.compute_loss(x=x, y=y, y_pred=model(x, training=True)).backward()
        return {v.path: (placements(v._value), placements(v._value.grad))
                for v in model.trainable_variables}  # fmt: skip

    for layouts in run_ranks(program, 4):
        assert layouts["shared/kernel"] == ("R S(1)", "R S(1)")
        assert layouts["head/kernel"] == ("R S(0)", "R S(0)")
        assert layouts["head/bias"] == ("R R", "R R")


def test_a_plain_gradient_of_torch_arrives_in_the_layout_of_its_variable():
    """The backward pass of `index_select` makes a plain tensor by `new_zeros`."""

    def program(rank):
        v = variable(("model", "data"))
        rows = torch.index_select(v.value, 0, torch.tensor([1, 5]))
        (rows * torch.arange(6.0)).sum().backward()
        gradient = v._value.grad
        return placements(gradient), gradient.full_tensor().numpy()

    expected = np.zeros((8, 6), "float32")
    expected[[1, 5]] = np.arange(6)
    for placed, gradient in run_ranks(program, 4):
        assert placed == "S(1) S(0)"
        np.testing.assert_array_equal(gradient, expected)


def test_states_that_are_deep_copied_are_loaded_again():
    """So loops keep their best weights."""

    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        keras.utils.set_random_seed(1)
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        def step():
            optimizer.zero_grad()
            (model(X) - torch.as_tensor(Y, device=DEVICE)).square().mean().backward()
            optimizer.step()

        step()
        weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        step()
        if mesh:
            with pytest.raises(ShardedTensorError, match="full_tensor"):
                torch.save(weights, io.BytesIO())
        return {v.path: v.numpy() for v in model.variables}

    assert_close(run_ranks(program, 2, (1, 2)), run_ranks(program, 1, None)[0])


def test_one_rank_alone_can_print_a_variable():
    def program(rank):
        v = variable((None, "model"))
        if rank:
            return None
        return repr(v), str(v)

    printed, text = run_ranks(program, 4, timeout=20)[0]
    assert printed == text
    assert "path=v, shape=(8, 6), dtype=float32, layout=(None, 'model')" in printed


def test_a_model_of_before_the_distribution_can_be_moved():
    def program(rank, mesh):
        keras.utils.set_random_seed(rank)
        model = mlp()
        if mesh:
            distribute(mesh, RULES)
            keras.utils.set_random_seed(rank)  # values differ: those of rank 0 are taken
            for v in model.variables:
                shardcore.distribute_variable(v)
            keras.utils.set_random_seed(0)  # `fit` asks for generators that agree
        model.compile(keras.optimizers.Adam(0.1, epsilon=1e-3), "mse")
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)
        return {v.path: v.numpy() for v in model.variables}

    assert_close(run_ranks(program, 2, (1, 2)), run_ranks(program, 1, None)[0])


def test_a_parameter_that_other_code_holds_is_refused():
    def program(rank):
        distribute((2, 1))
        keras.Variable(torch.nn.Parameter(torch.ones(2, device=DEVICE)))

    assert_fails_everywhere(program, 2, error=ArgumentProblem, match="was given a torch Parameter")
