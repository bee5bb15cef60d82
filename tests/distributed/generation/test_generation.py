"""`generate()`: prompts and tokens run from programs, with the tokens of one device."""

import numpy as np
import pytest
import torch
from keras import ops

import shardcore
from shardcore.binding import keras_private
from shardcore.binding.capture.step import CapturedStep
from shardcore.domain.capture import State
from shardcore.testing import run_ranks
from tests.distributed.generation.decoders import LENGTH, MESHES, PROMPT, decoder, states
from tests.distributed.programs import as_arrays


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


def test_tokens_run_from_programs_on_one_device_too():
    def program(rank, strategy):
        if strategy:
            shardcore.install(strategy)
        model = decoder(None)
        tokens = [as_arrays(model.generate(np.roll(PROMPT, n, 0))[0]) for n in range(5)]
        return tokens, states(model)

    ((expected, none),) = run_ranks(program, 1, None)
    ((tokens, captured),) = run_ranks(program, 1, "single")
    np.testing.assert_array_equal(tokens, expected)
    assert (none, captured) == ([], [(State.CAPTURED, 28)])


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

    def again(step, tensors, original=CapturedStep.run_again):
        made = original(step, tensors)
        if made is not None:
            memories.append(made[0][1].data_ptr())
        return made

    def program(rank, shape):
        monkeypatch.setattr(CapturedStep, "run_again", again)
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
