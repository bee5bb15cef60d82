"""`ops.while_loop` outside training, as `generate()` runs it, and slices at numbers in tensors."""

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import shardcore
from shardcore.binding import keras_private
from shardcore.binding.captured.step import CapturedStep
from shardcore.domain.steps.capture import State
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute

MESHES = ((1, 2), (2, 1))
RULES = {
    "decoder/kv/kernel": (None, None, "model", None),
    "decoder/query/kernel": (None, "model", None),
    "decoder/out/kernel": ("model", None, None),
}
PROMPT = np.array([[1, 2, 3, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]], "int32")
LENGTH = PROMPT.shape[1]


class Decoder(keras.Model):
    """One block of attention with a cache of keys and values, and a loop over tokens."""

    def __init__(self):
        super().__init__(name="decoder")
        self.embed = layers.Embedding(16, 8, "random_normal", name="embed")
        self.query = layers.EinsumDense("btd,dhk->bthk", (None, 2, 4), name="query")
        self.kv = layers.EinsumDense("btd,dshk->bsthk", (2, None, 2, 4), name="kv")
        self.out = layers.EinsumDense("bthk,hkd->btd", (None, 8), name="out")
        self.scale = 1.0

    def call(self, tokens):
        return self._build_cache(tokens)[0]

    def _build_cache(self, tokens):
        """Fills a cache with prompts; named as in keras-hub."""
        return self.with_cache(tokens, ops.zeros((len(tokens), 2, LENGTH, 2, 4)), 0)

    def with_cache(self, tokens, cache, place):
        x = self.embed(tokens)
        cache = ops.slice_update(cache, [0, 0, place, 0, 0], self.kv(x))
        seen = ops.arange(LENGTH)[None] <= place + ops.arange(tokens.shape[1])[:, None]
        scores = ops.einsum("bthk,bshk->bhts", self.query(x), cache[:, 0]) * self.scale
        scores = ops.softmax(ops.where(seen, scores, -1e9))
        x = self.out(ops.einsum("bhts,bshk->bthk", scores, cache[:, 1]))
        return ops.matmul(x, ops.transpose(self.embed.embeddings)), cache

    def generate(self, prompt, bias=0.0, stop=None):
        """Writes the likeliest token into each free place, until `stop` is in every row."""
        with torch.no_grad():
            prompt = shardcore.ensure_dtensor_input(prompt) if distributed() else prompt
            prompt = ops.convert_to_tensor(prompt)
            given, bias = prompt > 0, ops.convert_to_tensor(bias)
            _, cache = self._build_cache(prompt)
            first = ops.min(ops.sum(ops.cast(given, "int32"), axis=1))

            def goes_on(tokens, cache, place):
                if stop is None:
                    return True
                return ops.logical_not(ops.all(ops.any((tokens == stop) & ~given, axis=1)))

            def add_token(tokens, cache, place):
                last = ops.slice(tokens, [0, place - 1], [len(tokens), 1])
                logits, cache = self.with_cache(last, cache, place - 1)
                found = ops.cast(ops.argmax(logits[:, 0] + bias, axis=-1), tokens.dtype)
                found = ops.where(given[:, place], tokens[:, place], found)
                tokens = ops.slice_update(tokens, [0, place], found[:, None])
                return tokens, cache, place + 1

            return ops.while_loop(goes_on, add_token, (prompt, cache, first), LENGTH - first)


def distributed():
    return keras.distribution.distribution() is not None


def decoder(shape, **options):
    if shape is not None:
        distribute(shape, RULES, **options)
    keras.utils.set_random_seed(3)
    model = Decoder()
    model.compile("sgd", "mse")
    model(PROMPT)
    return model


def states(model):
    """The steps of the model's loops: their states, and how often their programs ran."""
    steps = vars(model).get(keras_private.LOOP_STEPS, {}).values()
    found = [entry.progress for step in steps for entry in step._entries.values()]
    return [(each.state, each.runs) for each in found]


def prompt_states(model):
    """The steps of the prompts of the model, likewise."""
    prompt = vars(model).get(keras_private.FILLS_CACHE)
    entries = [] if prompt is None else prompt.captured._entries.values()
    return [(each.progress.state, each.progress.runs) for each in entries]


def test_prompts_and_tokens_run_from_programs_with_the_tokens_of_one_device():
    def program(rank, shape):
        model = decoder(shape)
        tokens = [as_arrays(model.generate(np.roll(PROMPT, n, 0))[0]) for n in range(5)]
        return tokens, states(model), prompt_states(model)

    (expected, *_) = run_ranks(program, 1, None)[0]
    assert (expected[0] != expected[1]).any()
    for shape in MESHES:
        for tokens, found, prompts in run_ranks(program, 2, shape):
            np.testing.assert_array_equal(tokens, expected)
            # Six tokens are free: the first two were recorded, and the rest ran from the program.
            assert found == [(State.CAPTURED, 28)]
            # Known after the first loop: the second and third prompts were recorded.
            assert prompts == [(State.CAPTURED, 2)]


@pytest.mark.parametrize(("shared", "found"), [(True, [(State.CAPTURED, 2)]), (False, [])])
def test_a_prompt_of_plain_rows_is_captured_if_all_ranks_have_all_of_them(shared, found):
    def program(rank):
        model = decoder((2, 1), auto_shard_dataset=shared)
        model.generate(PROMPT)
        with torch.no_grad():
            for _ in range(4):
                model._build_cache(ops.convert_to_tensor(PROMPT))
        return prompt_states(model)

    assert run_ranks(program, 2) == [found] * 2


def test_prompts_are_eager_after_uninstall_and_captured_once_more_after_install():
    def program(rank):
        shardcore.install("single")
        model = decoder(None)
        tokens = [as_arrays(model.generate(PROMPT)[0]) for _ in range(4)]
        shardcore.uninstall()
        tokens.append(as_arrays(model.generate(PROMPT)[0]))
        shardcore.install("single")
        tokens += [as_arrays(model.generate(PROMPT)[0]) for _ in range(4)]
        return tokens, prompt_states(model)

    ((tokens, found),) = run_ranks(program, 1)
    np.testing.assert_array_equal(tokens, tokens[:1] * 9)
    assert found == [(State.CAPTURED, 1)]


def test_a_token_reduces_one_sum_and_moves_no_cache():
    def program(rank, shape):
        model = decoder(shape)
        cache = model.generate(PROMPT)[1]
        (step,) = vars(model)[keras_private.LOOP_STEPS].values()
        (entry,) = step._entries.values()
        collectives = [(each.kind, each.elements) for each in entry.programs[0].collectives]
        return collectives, tuple(cache.to_local().shape)

    for collectives, local in run_ranks(program, 2, (1, 2)):
        assert [elements for _, elements in collectives] == [2 * 8]  # of `out`: rows, features
        assert local == (2, 2, LENGTH, 1, 4)
    for collectives, local in run_ranks(program, 2, (2, 1)):
        assert collectives == []
        assert local == (1, 2, LENGTH, 2, 4)


def test_tokens_overwrite_one_cache_which_is_not_the_given_one(monkeypatch):
    memories = []

    def again(step, tensors, original=CapturedStep.again):
        made = original(step, tensors)
        if made is not None:
            memories.append(made[0][1].data_ptr())
        return made

    def program(rank, shape):
        monkeypatch.setattr(CapturedStep, "again", again)
        model = decoder(shape)
        expected = [as_arrays(each) for each in model.generate(PROMPT)]
        with torch.no_grad():
            given = model._build_cache(ops.convert_to_tensor(PROMPT))
        before = as_arrays(given[1])
        model._build_cache = lambda tokens: given
        memories.clear()
        found = model.generate(PROMPT)
        assert not found[1].to_local().is_inference()
        return as_arrays(given[1]), before, [as_arrays(each) for each in found], expected, memories

    for shape in MESHES:
        for given, before, found, expected, tokens in run_ranks(program, 2, shape):
            np.testing.assert_array_equal(given, before)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
            # Of six tokens, three run on what the program has made twice.
            assert len(tokens) == 3
            assert len(set(tokens)) == 1


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
