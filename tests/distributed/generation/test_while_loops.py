"""`ops.while_loop` outside training, and slices at numbers in tensors."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import shardcore
from shardcore.domain.capture import State
from shardcore.testing import run_ranks
from tests.distributed.generation.decoders import MESHES, PROMPT, decoder, states
from tests.distributed.programs import as_arrays, assert_close, distribute


def test_what_a_loop_returns_shares_no_memory_with_the_model():
    def program(rank):
        model = decoder((1, 2))
        table = model.embed.embeddings

        def read(_, count):
            return ops.convert_to_tensor(model.embed.embeddings), count + 1

        with torch.no_grad():
            first = ops.zeros_like(table), ops.convert_to_tensor(0)
            for _ in range(2):
                found, _ = ops.while_loop(lambda *_: True, read, first, 6)
        memories = {each.to_local().data_ptr() for each in (found, table.value)}
        return states(model), len(memories), np.array_equal(as_arrays(found), as_arrays(table))

    assert run_ranks(program, 2) == [([(State.CAPTURED, 10)], 2, True)] * 2


def test_the_next_loop_sees_other_tensors_numbers_and_attributes():
    def program(rank, shape):
        model = decoder(shape)
        found = []
        for bias, stop in ((np.zeros(16), None), (5 * np.eye(16)[7], None), (np.zeros(16), 7)):
            found += [model.generate(PROMPT, np.float32(bias), stop)[0] for _ in range(2)]
        model.scale = -1e6
        found += [model.generate(PROMPT)[0] for _ in range(2)]
        return as_arrays(dict(enumerate(found)))

    (reference,) = run_ranks(program, 1, None)
    assert (reference[2][:, 3:] == 7).all()
    assert (reference[6] != reference[0]).any()
    for shape in MESHES:
        assert_close(run_ranks(program, 2, shape), reference, atol=0)


def test_a_loop_ends_on_all_ranks_when_every_row_has_the_stop_token():
    def program(rank, shape):
        model = decoder(shape)
        biased = np.float32(5 * np.eye(16)[7])
        found = [model.generate(PROMPT, biased, stop=7) for _ in range(2)]
        return [(as_arrays(tokens), int(as_arrays(place))) for tokens, _, place in found]

    reference = run_ranks(program, 1, None)[0]
    assert {place for _, place in reference} == {4}
    for result in run_ranks(program, 2, (2, 1)):
        assert [place for _, place in result] == [4, 4]
        np.testing.assert_array_equal([each for each, _ in result], [each for each, _ in reference])


def test_a_loop_in_training_is_differentiated():
    def program(rank):
        model = decoder((1, 2))
        kernel = model.query.kernel

        def doubled(x, count):
            return x * 2 + ops.sum(kernel) * 0, count + 1

        x = ops.convert_to_tensor(1.0)
        made, _ = ops.while_loop(lambda _x, count: count < 3, doubled, (x + kernel[0, 0, 0], 0))
        made.backward()
        return float(made.detach()), states(model)

    for _, found in run_ranks(program, 2):
        assert found == []


@pytest.mark.parametrize("spec", [(None, None), ("data", None), (None, "model")])
def test_slices_at_numbers_in_tensors_are_those_of_numpy(spec):
    whole = np.arange(24, dtype="float32").reshape(4, 6)

    def program(rank):
        distribute((2, 2))
        x = shardcore.distribute_tensor(whole, spec)
        two, last = ops.convert_to_tensor(2), ops.convert_to_tensor(-1)
        return as_arrays(
            {
                "taken": ops.slice(x, [0, two], [4, 3]),
                "last row": ops.slice(x, [last, 1], [1, 2]),
                "updated": ops.slice_update(x, [0, two], -ops.ones((4, 3))),
                "last column": ops.slice_update(x, [0, last], -ops.ones((4, 1))),
                "by numbers": ops.slice_update(x, [1, 2], -ops.ones((2, 3))),
            }
        )

    expected = {"taken": whole[:, 2:5], "last row": whole[-1:, 1:3]}
    for name, place in (
        ("updated", np.s_[:, 2:5]),
        ("last column", np.s_[:, -1:]),
        ("by numbers", np.s_[1:3, 2:5]),
    ):
        expected[name] = whole.copy()
        expected[name][place] = -1
    assert_close(run_ranks(program, 4), expected, atol=0)


def test_a_loop_of_several_shapes_sees_attributes_that_changed_since_the_last_loop():
    def program(rank):
        distribute((2, 1))
        model = keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.build((None, 2))
        model.compile("sgd", "mse")
        model.scale = 1.0

        def longer(x, count):
            """Adds a row to the first variable, by a sum of what the model holds."""
            row = ops.sum(model.layers[0].kernel) * model.scale
            return ops.concatenate([x, ops.reshape(row, (1,))]), count + 1

        def grown():
            with torch.no_grad():
                return as_arrays(
                    ops.while_loop(lambda x, count: count < 3, longer, (np.zeros(1), 0))
                )

        before = [grown()[0] for _ in range(4)]
        model.scale = 3.0
        return before, grown()[0]

    for before, after in run_ranks(program, 2):
        np.testing.assert_array_equal(before, [[0, 2, 2, 2]] * 4)
        np.testing.assert_array_equal(after, [0, 6, 6, 6])
