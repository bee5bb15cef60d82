"""Attention by the operators of CUDA, which `tests.cuda_attention` computes: as on one device."""

import sys
from functools import partial

import keras
import numpy as np
import pytest
import torch
from torch.nn import functional

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests import cuda_attention
from tests.distributed.interpreter_events import follow
from tests.distributed.programs import as_arrays, assert_close, distribute, placements
from tests.fallbacks import fallbacks

RNG = np.random.default_rng(0)
BATCH, HEADS, LENGTH, SIZE = 2, 4, 7, 8
OPERANDS = [RNG.normal(size=(BATCH, HEADS, LENGTH, SIZE)).astype("float32") for _ in range(4)]
KEPT = RNG.uniform(size=(BATCH, 1, LENGTH, LENGTH)) > 0.4
KEPT[..., 0] = True
MASK = np.where(KEPT, 0, torch.finfo(torch.float32).min * 0.7).astype("float32")
BY_HEADS, BY_LENGTH = ("data", "model", None, None), ("data", None, "model", None)
# By name: the operator on CUDA, whether it is masked, whether it is causal.
CASES = {
    f"{kind}, {how}": (kind, how == "masked", how == "causal")
    for kind in cuda_attention.KINDS
    for how in ("full", "causal", "masked")
    if (kind, how) != ("flash", "masked")
}


def on_cpu(query, key, value, mask, causal):
    return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


def results(attend, tensors, mask, causal):
    """The output, and the gradients of query, key, value, and of a mask that is trained."""
    trained = [each.requires_grad_() for each in tensors[:3]]
    if mask is not None and mask.requires_grad:
        trained.append(mask)
    output = attend(*tensors[:3], mask, causal)
    gradients = torch.autograd.grad((output * tensors[3]).sum(), trained)
    names = ("output", "query", "key", "value", "mask")
    return dict(zip(names, (output, *gradients), strict=False))


def operands(length, masked, spec=None):
    """Query, key, value, and weights of the output; and the mask, a plain tensor."""
    tensors = [torch.as_tensor(each[:, :, :length].copy()) for each in OPERANDS]
    if spec is not None:
        tensors = [shardcore.distribute_tensor(each, spec) for each in tensors]
    return tensors, torch.as_tensor(MASK[:, :, :length, :length]) if masked else None


def one_device(length):
    """The numbers of the operator of the CPU, without a mesh."""
    found = {}
    for name, (_, masked, causal) in CASES.items():
        of_case = results(on_cpu, *operands(length, masked), causal)
        found |= {f"{name}: {what}": value for what, value in of_case.items()}
    return as_arrays(found)


def over_ranks(rank, mesh, spec, length):
    """The numbers, where the outputs are, the collectives, the calls of the operators."""
    distribute(mesh)
    values, places, moved = {}, {}, {}
    with cuda_attention.on_cpu() as calls:
        for name, (kind, masked, causal) in CASES.items():
            attend = partial(cuda_attention.attend, kind)
            with count_collectives() as traffic:
                found = results(attend, *operands(length, masked, spec), causal)
            values |= {f"{name}: {what}": value for what, value in found.items()}
            places[name], moved[name] = placements(found["output"]), dict(traffic.calls)
    return as_arrays(values), places, moved, calls


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)])
def test_heads_stay_sharded_and_nothing_moves(mesh):
    expected, ranks = one_device(LENGTH), mesh[0] * mesh[1]
    for values, places, moved, calls in run_ranks(over_ranks, ranks, mesh, BY_HEADS, LENGTH):
        assert_close([values], expected)
        assert set(places.values()) == {"S(0) S(1)"}
        assert all(each == {} for each in moved.values())
        own = (BATCH // mesh[0], HEADS // mesh[1], LENGTH, SIZE)
        assert [shape for _, shape in calls] == [own] * 2 * len(CASES)


@pytest.mark.parametrize(("ranks", "length", "others"), [(2, 7, 0), (3, 4, 3)])
def test_a_sharded_sequence_runs_in_a_ring(ranks, length, others):
    """Of 4 elements over 3 ranks the last one has none; the product behind it needs `others`."""
    expected = one_device(length)
    for values, places, moved, _ in run_ranks(over_ranks, ranks, (1, ranks), BY_LENGTH, length):
        assert_close([values], expected)
        assert set(places.values()) == {"S(0) S(2)"}
        assert {each["all_to_all"] for each in moved.values()} == {3 * (ranks - 1) + others}


def test_a_mask_that_is_trained_gets_its_gradient():
    """A mask for all heads, whose gradient is a sum over the ranks, and a mask for each."""
    masks = [RNG.normal(size=(1, h, LENGTH, LENGTH)).astype("float32") for h in (1, HEADS)]

    def all_masks(attend, spec):
        found = {}
        for each in masks:
            mask = torch.tensor(each, requires_grad=True)
            with count_collectives() as traffic:
                of_mask = results(attend, operands(LENGTH, False, spec)[0], mask, False)
            found[each.shape[1]] = as_arrays(of_mask), dict(traffic.calls)
        return found

    def program(rank):
        distribute((1, 2))
        with cuda_attention.on_cpu():
            return all_masks(partial(cuda_attention.attend, "efficient"), BY_HEADS)

    expected = all_masks(on_cpu, None)
    for found in run_ranks(program, 2):
        for heads, (values, moved) in found.items():
            assert_close([values], expected[heads][0])
            assert moved == {}


def test_with_dropout_every_rank_computes_all_heads():
    """So that all draw the numbers of one device."""

    def program(rank):
        distribute((1, 2))
        with cuda_attention.on_cpu() as calls:
            (query, *_), _ = operands(LENGTH, False, BY_HEADS)
            operator = torch.ops.aten._scaled_dot_product_flash_attention.default
            operator(query.requires_grad_(), query, query, 0.5)[0].sum().backward()
        return calls, dict(fallbacks())

    for calls, counted in run_ranks(program, 2):
        assert [shape for _, shape in calls] == [(BATCH, HEADS, LENGTH, SIZE)] * 2
        assert sum(counted.values()) == 2


ATTENDED, ran = "shardcore.tests.attended", []


def attend(kind, query, key, value, attn_mask=None, is_causal=False, scale=None):
    sys.audit(ATTENDED)
    return cuda_attention.attend(kind, query, key, value, attn_mask, is_causal, scale)


def block(causal):
    keras.utils.set_random_seed(7)
    x = keras.Input((6, 8))
    h = keras.layers.MultiHeadAttention(4, 8, name="attention")(x, x, use_causal_mask=causal)
    model = keras.Model(x, keras.layers.Dense(3, name="head")(h))
    model.compile("sgd", "mse")
    return model


def trained(causal):
    """Losses and weights after six steps."""
    follow(ATTENDED, ran)
    rng, model = np.random.default_rng(3), block(causal)
    x, y = rng.normal(size=(6, 4, 6, 8)), rng.normal(size=(6, 4, 6, 3))
    losses = [model.train_on_batch(*each) for each in zip(x, y, strict=True)]
    return dict(enumerate([np.asarray(losses), *model.get_weights()]))


@pytest.mark.parametrize("kind", cuda_attention.KINDS)
def test_a_block_of_keras_trains_by_them_in_captured_steps(kind):
    causal = kind != "flash"  # Keras makes a mask of it

    def program(rank):
        distribute(
            (1, 2),
            {
                "attention/(query|key|value)/kernel": (None, "model", None),
                "attention/(query|key|value)/bias": ("model", None),
                "attention/attention_output/kernel": ("model", None, None),
            },
        )

        functional.scaled_dot_product_attention = partial(attend, kind)
        with cuda_attention.on_cpu() as calls:
            return trained(causal), calls, len(ran), dict(fallbacks())

    (expected,) = run_ranks(lambda rank: trained(causal), 1)
    for values, calls, runs, counted in run_ranks(program, 2):
        assert_close([values], expected)
        assert {shape[1] for _, shape in calls} == {2}
        assert len(calls) == 2 * 6
        assert runs == 3, "once for shapes, and in the two steps that are recorded"
        assert counted == {}
