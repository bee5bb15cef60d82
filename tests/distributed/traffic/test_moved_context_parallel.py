"""Collectives and kept activations of a step under policy `context_parallel`.

Eager and captured steps are compared with one device in the same run, and their collectives and
bytes with the sizes of the model alone.
"""

from functools import partial

import keras
import numpy as np
import pytest
from keras import layers
from torch.autograd.graph import saved_tensors_hooks

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import IS_ON_GPU, STRATEGY
from tests.distributed.traffic.moved import (
    BATCH,
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

BLOCKS = 1
# Queries of both are as wide as the model, or twice as wide.
BUILDS = {
    "heads": (partial(transformer, BLOCKS), WIDTH),
    "groups": (partial(transformer, BLOCKS, attention="groups"), 2 * WIDTH),
}


def of_sequences(rank, mesh=None, attention="heads"):
    """The numbers after four steps, the last captured; what an eager and the last one move."""
    build, _ = BUILDS[attention]
    if mesh:
        distribute(build, mesh, policy="context_parallel")
    _, *eager = trained(build, (TOKENS, TOKENS))
    keras.utils.clear_session(free_memory=False)
    if mesh:
        distribute(build, mesh, policy="context_parallel")
    model = compiled(build, classes=True)
    for _ in range(3):
        model.train_on_batch(TOKENS, TOKENS)
    with count_collectives() as traffic:
        logs = model.train_on_batch(TOKENS, TOKENS, return_dict=True)
    found = numbers(model, logs)
    of_variables = sum(found[v.path].nbytes for v in model.trainable_variables)
    return found, eager, [dict(traffic.calls), dict(traffic.operand_bytes)], of_variables


@pytest.mark.parametrize(
    ("mesh", "attention"), [((1, 2), "heads"), ((1, 3), "groups"), ((2, 2), "heads")]
)
def test_a_step_sends_keys_and_values_on_and_reduces_gradients(mesh, attention):
    ((expected, *_),) = run_ranks(of_sequences, 1, None, attention)
    (data, seq), axes = mesh, sum(size > 1 for size in mesh)
    keys = 4 * (BATCH // data) * (LENGTH // seq) * BUILDS[attention][1]
    hops = 3 * (seq - 1) * BLOCKS  # keys and values forward, and with their gradients backward
    for found, eager, captured, of_variables in run_ranks(
        of_sequences, data * seq, mesh, attention, timeout=200
    ):
        assert_same(found, expected, f"{attention} on {mesh}")
        moved = {"all_to_all": 2 * hops * keys, "all_reduce": axes * (of_variables + 4)}
        assert eager == [{"all_to_all": hops, "all_reduce": 2 * axes}, moved]
        # The loss joins the gradients along one axis.
        assert captured == [{"all_to_all": hops, "all_reduce": 2 * axes - 1}, moved]


def masked():
    """Sequences of seven tokens, the last of which are padded, through both attentions."""
    tokens = keras.Input((7,), dtype="int32")
    h = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="tokens")(tokens)
    g = layers.LayerNormalization(name="norm_1")(h)
    h = h + layers.MultiHeadAttention(3, 4, name="heads")(g, g, use_causal_mask=True)
    g = layers.LayerNormalization(name="norm_2")(h)
    h = h + layers.GroupQueryAttention(4, 4, 2, name="groups")(g, g)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(h))


PADDED = np.where(np.arange(7) < 5, np.arange(1, 8), 0) * np.ones((BATCH, 1), "int64")
OTHERS = {"dropout": (partial(transformer, 1, dropout=0.3), TOKENS), "masked": (masked, PADDED)}


def test_dropout_inside_an_attention_and_padding_have_the_numbers_of_one_device():
    def program(rank, mesh=None):
        found = {}
        for name, (build, tokens) in OTHERS.items():
            keras.utils.clear_session(free_memory=False)
            if mesh:
                distribute(build, mesh, policy="context_parallel")
            found[name], *_ = trained(build, (tokens, tokens))
        return found

    (expected,) = run_ranks(program, 1)
    for found in run_ranks(program, 2, (1, 2)):
        for name in OTHERS:
            assert_same(found[name], expected[name], name)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_memory(tensor):
    return local(tensor.detach()).untyped_storage().data_ptr()


def kept_bytes(rank, mesh=None):
    """The bytes of activations that a step keeps for its backward pass on this rank, and how many
    causal masks of all rows and heads beside them, which Keras has before 3.15.
    """
    build, _ = BUILDS["heads"]
    if mesh:
        distribute(build, mesh, policy="context_parallel")
    model = compiled(build, classes=True, jit_compile=False)
    model.train_on_batch(TOKENS, TOKENS)
    variables = {local_memory(v.value) for v in model.variables}
    kept, masks = {}, set()

    def note(tensor):
        memory = local_memory(tensor)
        if tensor.shape == (1, 1, LENGTH, LENGTH):
            masks.add(memory)
        # Every rank has numbers and targets.
        elif memory not in variables and tensor.is_floating_point() and tensor.ndim:
            kept[memory] = local(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model.train_on_batch(TOKENS, TOKENS)
    return sum(each.untyped_storage().nbytes() for each in kept.values()), len(masks)


def test_activations_fall_with_the_axis():
    ((whole, masks),) = run_ranks(kept_bytes, 1)
    for mesh in ((1, 3), (2, 2)):
        ranks = mesh[0] * mesh[1]
        for kept, masks_of_rank in run_ranks(kept_bytes, ranks, mesh):
            # CUDA's attention pads what one device keeps, and a ring keeps no padding.
            assert kept <= whole // ranks if IS_ON_GPU else kept == whole // ranks
            assert masks_of_rank == masks


def of_heads_too(rank, mesh=None):
    """The numbers after four steps, the last captured; what the last one moves."""
    build, _ = BUILDS["heads"]
    if mesh:
        shardcore.install(STRATEGY)
        device_mesh = keras.distribution.DeviceMesh(mesh, ["data", "seq", "model"])
        options = {"axis": "seq", "tensor": "model", "small": 0}
        shardcore.plan(build, device_mesh, "context_parallel", **options).distribute()
    model = compiled(build, classes=True)
    for _ in range(3):
        model.train_on_batch(TOKENS, TOKENS)
    with count_collectives() as traffic:
        logs = model.train_on_batch(TOKENS, TOKENS, return_dict=True)
    return numbers(model, logs), dict(traffic.calls), dict(traffic.operand_bytes)


def test_a_ring_has_the_heads_of_its_ranks_beside_tensor_parallelism():
    ((expected, *_),) = run_ranks(of_heads_too, 1)
    keys = 4 * BATCH * (LENGTH // 2) * WIDTH // 2  # of half the tokens, and half the heads
    for found, calls, moved in run_ranks(of_heads_too, 4, (1, 2, 2), timeout=200):
        assert_same(found, expected, "sequences and heads")
        assert calls["all_to_all"] == 3 * BLOCKS
        assert moved["all_to_all"] == 2 * 3 * BLOCKS * keys
        assert calls.keys() == {"all_to_all", "all_reduce"}
