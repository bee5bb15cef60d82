"""The collectives of a step that is traced without values, beside those of real ranks."""

from collections import Counter

import keras
import numpy as np
import pytest
from keras import layers

import shardcore
from shardcore.binding.planning.make_plan import facts_of
from shardcore.bootstrap import machines, search
from shardcore.bootstrap.traces import PlannedCandidate, TraceRequest, traces
from shardcore.policies.candidates import candidates
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import Block

ROWS = 8


def decoder():
    tokens = keras.Input((16,), dtype="int32")
    h = layers.Embedding(512, 64, name="embedding")(tokens)
    h = Block(64, 4, name="block")(h)
    model = keras.Model(tokens, layers.Dense(512, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


def mlp():
    x = h = keras.Input((96,))
    for number in range(2):
        h = layers.Dense(256, activation="relu", name=f"up_{number}")(h)
        h = layers.Dense(96, name=f"down_{number}")(h)
    model = keras.Model(x, h)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


class Experts(layers.Layer):
    """Four experts, to each of which a row sends two tokens."""

    def build(self, shape):
        self.up = self.add_weight(shape=(4, 32, 128), name="up")
        self.down = self.add_weight(shape=(4, 128, 32), name="down")

    def call(self, x):
        h = keras.ops.einsum("gecd,edh->gech", keras.ops.reshape(x, (-1, 4, 2, 32)), self.up)
        h = keras.ops.einsum("gech,ehd->gecd", keras.ops.relu(h), self.down)
        return keras.ops.reshape(h, (-1, 8, 32))


def experts():
    x = keras.Input((8, 32))
    h = layers.Dense(32, name="before")(x)
    model = keras.Model(x, layers.Dense(32, name="after")(Experts(name="experts")(h)))
    model.compile("adam", "mse", jit_compile=False)
    return model


TOKENS = np.zeros((ROWS, 16), "int32")
NUMBERS = np.zeros((ROWS, 96), "float32")
GROUPS = np.zeros((ROWS, 8, 32), "float32")
BATCHES = {decoder: (TOKENS, TOKENS), mlp: (NUMBERS, NUMBERS), experts: (GROUPS, GROUPS)}


def is_asked(candidate, devices):
    """Returns whether two axes have several devices; two devices test meshes of one such axis."""
    return devices == 2 or sum(size > 1 for size in candidate.mesh.shape) > 1


def traced(build, devices):
    """Returns each candidate, with the collectives of its traced step."""
    facts, machine = facts_of(build, None), machines.find("a100")
    ruled = [
        search.with_rules(each, ROWS, machine, facts)
        for each in candidates(devices, host=2)
        if each.policy == "expert_parallel" or (build is not experts and is_asked(each, devices))
    ]
    planned = [each for each in ruled if isinstance(each, PlannedCandidate)]
    asked = TraceRequest(build, BATCHES[build], ROWS)
    found = []
    for each, step in zip(planned, traces(planned, asked, machine, facts), strict=True):
        calls, operand_bytes = Counter(), Counter()
        for moved in step.on(each.candidate.mesh).moved:
            kind = "all_to_all" if moved.kind == "send" else moved.kind
            calls[kind] += moved.times
            operand_bytes[kind] += moved.times * moved.operand_bytes
        found.append((each.candidate, dict(calls), dict(operand_bytes)))
    return found


def counted(_, build, asked):
    """Returns the collectives of a real rank, for each candidate."""
    found = []
    for candidate in asked:
        keras.utils.clear_session(free_memory=False)
        shardcore.install()
        mesh = keras.distribution.DeviceMesh(candidate.mesh.shape, candidate.mesh.axis_names)
        shardcore.plan(build, mesh, candidate.policy).distribute()
        model, batch = build(), BATCHES[build]
        model.train_on_batch(*batch)
        with count_collectives() as traffic:
            model.train_on_batch(*batch)
        found.append((candidate, dict(traffic.calls), dict(traffic.operand_bytes)))
    return found


@pytest.mark.parametrize(("build", "devices"), [(mlp, 2), (decoder, 4), (experts, 4)])
def test_a_traced_step_moves_what_real_ranks_move(build, devices):
    keras.Input((1,))  # names are counted on from here, and the rules of a plan have such names
    expected = traced(build, devices)
    asked = [candidate for candidate, _, _ in expected]
    assert any(each.policy == "expert_parallel" for each in asked) == (build is experts)
    for found in run_ranks(counted, devices, build, asked, timeout=200):
        assert found == expected
