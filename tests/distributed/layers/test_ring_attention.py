"""Attention whose sequence is sharded: the numbers of one device, and what goes around the ring."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import (
    DEVICE,
    STRATEGY,
    as_arrays,
    assert_close,
    distribute,
    placements,
)

RNG = np.random.default_rng(0)
BATCH, HEADS, SIZE = 2, 3, 8
# A link on which nothing costs time, so that stripes are always taken.
FREE = shardcore.Link(1e-18, 1e30)
MASKED = torch.finfo(torch.float32).min * 0.7  # as Keras masks


def operands(queries, keys):
    """Query, key, value, and weights of the output."""
    lengths = (queries, keys, keys, queries)
    shapes = [(BATCH, HEADS, length, SIZE) for length in lengths]
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


def mask(queries, keys, infinite):
    """A mask, with a row of masked keys only; as numbers that are added to scores."""
    kept = RNG.uniform(size=(BATCH, 1, queries, keys)) > 0.5
    kept[0, 0, 1] = False
    return np.where(kept, 0, -np.inf if infinite else MASKED).astype("float32")


def padding(keys):
    kept = np.arange(keys) < [[[[keys - 2]]], [[[1]]]]
    return np.where(kept, 0, MASKED).astype("float32")


# By name: the operands, the mask, and whether the attention is causal.
CASES = {
    "even": (operands(8, 8), None, False),
    "even, causal": (operands(8, 8), None, True),
    "uneven": (operands(7, 7), None, False),
    "uneven, causal": (operands(7, 7), None, True),
    "a rank without an element": (operands(5, 5), None, True),
    "masked": (operands(7, 7), mask(7, 7, infinite=False), False),
    "masked by infinities": (operands(7, 7), mask(7, 7, infinite=True), False),
    "padded": (operands(8, 8), padding(8), False),
    "of other lengths": (operands(6, 9), None, False),
}


SPEC = ("data", None, "model", None)


def attend(tensors, given, causal, spec=None):
    """The output, and the gradients of query, key and value; plain if `spec` is None."""
    tensors = [torch.as_tensor(each, device=DEVICE) for each in tensors]
    if spec is not None:
        tensors = [shardcore.distribute_tensor(each, spec) for each in tensors]
    query, key, value = (each.requires_grad_() for each in tensors[:3])
    given = None if given is None else torch.as_tensor(given, device=DEVICE)
    output = scaled_dot_product_attention(query, key, value, attn_mask=given, is_causal=causal)
    return output, torch.autograd.grad((output * tensors[3]).sum(), (query, key, value))


def every_case(rank, mesh=None, cases=tuple(CASES), links=None):
    """The numbers of the cases; where the outputs are; the collectives, and their bytes."""
    if mesh:
        shardcore.install(STRATEGY, links=links or {})
        distribute(mesh)
    values, places, moved = {}, {}, {}
    for name in cases:
        with count_collectives() as traffic:
            output, gradients = attend(*CASES[name], SPEC if mesh else None)
        results = zip(("output", "query", "key", "value"), (output, *gradients), strict=True)
        values |= {f"{name}: {what}": value for what, value in results}
        places[name] = placements(output)
        moved[name] = dict(traffic.calls), dict(traffic.operand_bytes)
    return as_arrays(values), places, moved


@pytest.fixture(scope="module")
def one_device():
    ((values, _, _),) = run_ranks(every_case, 1)
    return values


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)])
def test_the_numbers_are_those_of_one_device(mesh, one_device):
    results = run_ranks(every_case, 4 if mesh != (1, 2) else 2, mesh)
    assert_close([values for values, _, _ in results], one_device)
    for _, places, _ in results:
        assert set(places.values()) == {"S(0) S(2)"}


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4)])
def test_stripes_give_the_numbers_of_one_device(mesh, one_device):
    name = "even, causal"
    expected = {key: each for key, each in one_device.items() if key.startswith(f"{name}:")}
    results = run_ranks(every_case, mesh[1], mesh, (name,), {"model": FREE})
    assert_close([values for values, _, _ in results], expected)
    for _, places, _ in results:
        assert places == {name: f"S(0) S(2, block={8 // mesh[1]} x 1)"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_passes_on_keys_and_values_and_their_gradients(ranks):
    results = run_ranks(every_case, ranks, (1, ranks), ("even", "even, causal", "masked"))
    for rank, (_, _, moved) in enumerate(results):
        for name in ("even", "even, causal"):
            part = 4 * BATCH * HEADS * 8 // ranks * SIZE
            # Key and value forward, both and their gradients backward: each to one rank only.
            expected = {"all_to_all": 3 * (ranks - 1)}, {"all_to_all": 6 * (ranks - 1) * part}
            assert moved[name] == expected
        # Of 7 elements the last rank has one less: all others pass each part on.
        sizes = [2, 2, 2, 1] if ranks == 4 else [4, 3]
        held = [sizes[(rank - hop) % ranks] for hop in range(ranks)]
        passed = 4 * sum(held[:-1]) + 2 * sum(held[1:])
        bytes_of = 4 * BATCH * HEADS * SIZE
        assert moved["masked"][1] == {"all_to_all": passed * bytes_of}
