"""Megatron's rules on kernels alone: four all-reduces a block, and those of a sharded vocabulary.

With policy `sequence_parallel` an all-gather and a reduce-scatter each in their place.
"""

from functools import partial

import keras
import pytest

from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import mlp
from tests.distributed.traffic.moved import (
    BATCH,
    DATA,
    IS_3_13,
    LENGTH,
    TOKENS,
    VOCABULARY,
    WIDTH,
    assert_same,
    compiled,
    distribute,
    numbers,
    trained,
    transformer,
)

BLOCKS = {
    r".*attend/(query|key|value)/kernel": (None, "model", None),
    r".*attend/(query|key|value)/bias": ("model", None),
    r".*attend/attention_output/kernel": ("model", None, None),
    r".*_up/kernel": (None, "model"),
    r".*_up/bias": ("model",),
    r".*_down/kernel": ("model", None),
}
OF_VOCABULARY = {
    r"tokens/embeddings": ("model", None),
    r"logits/kernel": (None, "model"),
    r"logits/bias": ("model",),
}
# Keras 3.13 multiplies one-hot targets, which are replicated: so is the gradient of the logits.
OF_LOSS = 2 if IS_3_13 else 3
# Blocks, kind of attention, rate of dropout, whether the vocabulary is sharded.
ONE_AXIS = {
    2: [
        (1, "heads", 0.1, False),
        (2, "heads", 0.0, True),
    ],
    4: [(1, "groups", 0.0, False)],
}
TWO_AXES = [(1, "heads", 0.1, False), (1, "heads", 0.0, False), (1, "heads", 0.0, True)]


def every_case(rank, cases, mesh=None):
    found = {}
    for blocks, attention, dropout, vocabulary in cases:
        keras.utils.clear_session(free_memory=False)
        build = partial(transformer, blocks, attention, dropout)
        if mesh:
            distribute(build, mesh, BLOCKS | (OF_VOCABULARY if vocabulary else {}))
        found[blocks, attention, dropout, vocabulary] = trained(build, (TOKENS, TOKENS))
    return found


def expected_of(case, mesh, rows=BATCH, place=0):
    """The all-reduces of a rank, and their bytes, from the sizes of the model alone.

    The rank has that place along the axis of the batch, of so many rows.
    """
    blocks, _, _, vocabulary = case
    data, model = mesh
    most = -(-rows // data)
    tokens = LENGTH * min(most, rows - place * most)
    activation = 4 * tokens * WIDTH
    # Two sums forward and two backward in each block.
    calls, moved = 4 * blocks, 4 * blocks * activation
    if vocabulary:
        # The rows of the embedding, the gradient of the head's input; of each token the largest
        # logit, the sum of the powers, the sum of the gradient.
        calls, moved = calls + 2 + OF_LOSS, moved + 2 * activation + OF_LOSS * 4 * tokens
    for _ in range(vocabulary + (data > 1)):  # the loss, over each axis that it is pending on
        calls, moved = calls + 1, moved + 4
    if data > 1:
        calls, moved = calls + 1, moved + 4 * parameters_of_a_rank(case, model)
    return {"all_reduce": calls}, {"all_reduce": moved}


def parameters_of_a_rank(case, parts):
    """Counted by hand: kernels and biases that are sharded, and what is whole."""
    blocks, attention, _, vocabulary = case
    d = WIDTH
    assert attention == "heads"
    sharded = 3 * (d * d + d) + d * d + (d * 64 + 64) + 64 * d
    whole = d + d + 4 * d  # the biases behind the sums, two norms
    of_vocabulary = VOCABULARY * d + d * VOCABULARY + VOCABULARY
    found = blocks * (sharded // parts + whole) + 2 * d
    return found + (of_vocabulary // parts if vocabulary else of_vocabulary)


@pytest.fixture(scope="module")
def one_device():
    cases = {case: None for each in (*ONE_AXIS.values(), TWO_AXES) for case in each}
    (found,) = run_ranks(every_case, 1, list(cases), timeout=120)
    return {case: values for case, (values, _, _) in found.items()}


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)])
def test_a_block_takes_four_all_reduces(mesh, one_device):
    cases = ONE_AXIS[mesh[1]] if mesh[0] == 1 else TWO_AXES
    for rank in run_ranks(every_case, mesh[0] * mesh[1], cases, mesh, timeout=200):
        for case, (values, calls, moved) in rank.items():
            assert_same(values, one_device[case], f"{case} on {mesh}")
            assert (calls, moved) == expected_of(case, mesh), case


def of_dropout(rank, mesh=None):
    """A recorded step with seven rows, and dropout in the attention, after three others."""
    build = partial(transformer, 1, "heads", 0.1)
    if mesh:
        distribute(build, mesh, BLOCKS)
    model = compiled(build, classes=True)
    for _ in range(3):
        model.train_on_batch(TOKENS[:7], TOKENS[:7])
    with count_collectives() as traffic:
        logs = model.train_on_batch(TOKENS[:7], TOKENS[:7], return_dict=True)
    return numbers(model, logs), dict(traffic.calls), dict(traffic.operand_bytes)


def test_a_recorded_step_of_uneven_rows_moves_the_same():
    ((expected, _, _),) = run_ranks(of_dropout, 1)
    for rank, (values, calls, moved) in enumerate(run_ranks(of_dropout, 4, (2, 2))):
        assert_same(values, expected, "recorded, with dropout")
        sums, of_eager = expected_of((1, "heads", 0.1, False), (2, 2), rows=7, place=rank // 2)
        assert moved == of_eager
        assert set(calls) == set(sums)
        assert calls["all_reduce"] <= sums["all_reduce"]  # a captured step does several in one


def of_pairs(rank, mesh=None):
    """Two pairs of dense layers with separate activations, as the policy finds them."""
    if mesh:
        distribute(mlp, mesh, policy="tensor_parallel", small=0)
    return trained(mlp, DATA[mlp])


def test_a_pair_reduces_its_sum_before_its_activation():
    ((expected, _, _),) = run_ranks(of_pairs, 1)
    rows, (first, last) = len(DATA[mlp][0]), (32, 7)
    # The sums behind both pairs; and the gradient of what the second takes.
    moved = 4 * rows * (first + last + first)
    for values, calls, found in run_ranks(of_pairs, 2, (1, 2)):
        assert_same(values, expected, "pairs")
        assert (calls, found) == ({"all_reduce": 3}, {"all_reduce": moved})


# --- the sequence sharded between the regions -----------------------------------------------------

SEQUENCES = partial(transformer, 1)


def of_sequences(rank, mesh=None):
    """The collectives of an eager and of a captured step; the numbers after four."""
    if mesh:
        distribute(SEQUENCES, mesh, policy="sequence_parallel", small=0)
    _, *eager = trained(SEQUENCES, (TOKENS, TOKENS))
    keras.utils.clear_session(free_memory=False)
    if mesh:
        distribute(SEQUENCES, mesh, policy="sequence_parallel", small=0)
    model = compiled(SEQUENCES, classes=True)
    for _ in range(3):
        model.train_on_batch(TOKENS, TOKENS)
    with count_collectives() as traffic:
        logs = model.train_on_batch(TOKENS, TOKENS, return_dict=True)
    return numbers(model, logs), eager, [dict(traffic.calls), dict(traffic.operand_bytes)]


def expected_of_sequences(mesh, blocks=1):
    """The collectives of a rank, and their bytes, from the sizes of the model alone.

    The operand of an all-gather is a rank's part of an activation, that of a reduce-scatter all of
    it, as that of the all-reduce in whose place both stand.
    """
    data, model = mesh
    tokens = BATCH * LENGTH // data
    activation = 4 * tokens * WIDTH
    norms = 4 * (2 * blocks + 1) * 2 * WIDTH
    # In each block two of each forward and two backward. The rows of the embedding are scattered
    # too, and the input of the head is gathered; and the gradient of each the other way.
    gathers = scatters = 4 * blocks + 2
    # The gradients of the norms, of which each rank has the part of its tokens; and of the sharded
    # logits as in `expected_of`.
    calls, moved = 1 + OF_LOSS, norms + OF_LOSS * 4 * tokens
    for _ in range(1 + (data > 1)):  # the loss, over each axis that it is pending on
        calls, moved = calls + 1, moved + 4
    if data > 1:  # the gradients of all variables, those of the norms by themselves
        calls, moved = (
            calls + 2,
            moved + 4 * parameters_of_a_rank((blocks, "heads", 0.0, True), model),
        )
    return [
        {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": calls},
        {
            "all_gather": gathers * activation // model,
            "reduce_scatter": scatters * activation,
            "all_reduce": moved,
        },
    ]


def test_a_block_takes_four_pairs_of_a_gather_and_a_scatter():
    ((expected, *_),) = run_ranks(of_sequences, 1)
    for mesh in [(1, 2), (2, 2)]:
        calls, moved = expected_of_sequences(mesh)
        for values, eager, captured in run_ranks(of_sequences, mesh[0] * mesh[1], mesh):
            assert_same(values, expected, mesh)
            assert eager == [calls, moved]
            sums = captured[0]["all_reduce"]  # of which a captured step does several in one
            assert sums <= calls["all_reduce"]
            assert captured == [calls | {"all_reduce": sums}, moved]


def test_parameters_are_counted_as_keras_does():
    with keras.device("cpu"):  # on a GPU no rank could be forked afterwards
        model = compiled(partial(transformer, 2), classes=True)
    assert parameters_of_a_rank((2, "heads", 0.0, True), 1) == model.count_params()
