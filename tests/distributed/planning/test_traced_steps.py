"""The collectives of a step that is traced without values, beside those of real ranks."""

from functools import partial

import attrs
import keras
import numpy as np
import pytest
from keras import layers

from shardcore.binding.cost.plan import facts_of
from shardcore.bootstrap.cost import machines, search
from shardcore.bootstrap.cost.repeats import Repeats, trace_steps
from shardcore.bootstrap.cost.traces import Job, PlannedCandidate, TraceRequest, steps
from shardcore.policies.candidates import candidates
from shardcore.testing import run_ranks
from tests.distributed.models import Block
from tests.distributed.planning.traced_models import (
    BATCHES,
    ROWS,
    SCALES,
    counted,
    decoder,
    experts,
    mlp,
    moved_in,
    scales,
    unnamed,
)


class Cross(layers.Layer):
    """A block that reads the output of an encoder."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query = layers.Dense(32, name="query")
        self.norm = layers.LayerNormalization(name="norm")
        self.hidden = layers.Dense(32, activation="relu", name="hidden")

    def call(self, x, memory):
        scores = keras.ops.softmax(keras.ops.einsum("bqd,bkd->bqk", self.query(x), memory))
        return self.norm(x + self.hidden(keras.ops.einsum("bqk,bkd->bqd", scores, memory)))


def pairs(count):
    """A model with two runs, of `count` blocks each, whose gradients fill several buckets."""
    source, target = keras.Input((8, 32)), keras.Input((8, 32))
    memory = h = layers.Dense(32, name="source")(source)
    for number in range(count):
        memory = layers.Dense(32, activation="relu", name=f"encoder_{number}")(memory)
    for number in range(count):
        h = Cross(name=f"decoder_{number}")(h if number else target, memory=memory)
    wide = layers.Dense(2**16 * 3, use_bias=False, name="wide")(h[:, 0])
    model = keras.Model([source, target], layers.Dense(2, name="classes")(wide))
    optimizer = keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model


def is_asked(candidate, devices):
    """Returns whether two axes have several devices; two devices test meshes of one such axis."""
    return devices == 2 or sum(size > 1 for size in candidate.mesh.shape) > 1


def traced(build, devices):
    """Returns each candidate, with the collectives of its traced step."""
    facts, machine = facts_of(build, None), machines.find("a100")
    ruled = [
        search.plan_candidate(each, ROWS, machine, facts)
        for each in candidates(devices, host=2)
        if each.policy == "expert_parallel" or (build is not experts and is_asked(each, devices))
    ]
    planned = [each for each in ruled if isinstance(each, PlannedCandidate)]
    asked = TraceRequest(build, BATCHES[build], ROWS)
    priced = trace_steps([[each] for each in planned], asked, machine, Repeats.of(facts))
    return [
        (each.candidate, *moved_in(step)) for each, (step,) in zip(planned, priced, strict=True)
    ]


@pytest.mark.parametrize(("build", "devices"), [(mlp, 2), (decoder, 4), (experts, 4)])
def test_a_traced_step_moves_what_real_ranks_move(build, devices):
    keras.Input((1,))  # names are counted on from here, and the rules of a plan have such names
    expected = traced(build, devices)
    asked = [candidate for candidate, _, _ in expected]
    assert any(each.policy == "expert_parallel" for each in asked) == (build is experts)
    for found in run_ranks(counted, devices, build, asked, timeout=200):
        assert found == expected


def test_blocks_whose_small_weights_are_held_are_traced_once():
    keras.Input((1,))  # names are counted on from here
    facts, machine = facts_of(scales, None), machines.find("a100")
    (wanted,) = (each for each in candidates(2, host=2) if each.policy == "fully_sharded")
    planned, repeats = search.plan_candidate(wanted, 2, machine, facts), Repeats.of(facts)
    assert [len(run.traced) for run in repeats.runs_of(planned)] == [4]
    asked = TraceRequest(scales, BATCHES[scales], 2)
    ((step,),) = trace_steps([[planned]], asked, machine, repeats)
    expected = [(wanted, *moved_in(step))]
    ((_, calls, _),) = expected
    assert calls["all_gather"] == SCALES  # in the backward pass all are held
    for found in run_ranks(counted, 2, scales, [wanted]):
        assert found == expected


def deep_decoder():
    tokens = keras.Input((16,), dtype="int32")
    h = layers.Embedding(512, 64, name="embedding")(tokens)
    for number in range(8):
        h = Block(64, 4, name=f"block_{number}")(h)
    model = keras.Model(tokens, layers.Dense(512, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


def test_four_blocks_of_a_decoder_show_the_others():
    """Keras 3.13 holds the operands of layers in reference cycles."""
    facts, machine = facts_of(deep_decoder, None), machines.find("a100")
    (wanted,) = (each for each in candidates(2, host=2) if each.policy == "data_parallel")
    planned = search.plan_candidate(wanted, 2, machine, facts)
    job = Job(planned, (wanted.mesh,), Repeats.of(facts).runs_of(planned))
    assert [len(run.traced) for run in job.runs] == [4]
    rows = np.zeros((1, 16), "int32")
    (found,) = steps([job], TraceRequest(deep_decoder, (rows, rows), 2), machine, facts)
    assert found is not None


# Its gradients are summed over two axes, one after the other.
WANTED = "context_parallel (data=2, seq=2)"


def test_blocks_that_a_trace_leaves_out_cost_what_they_cost_in_a_full_trace():
    build, batch = partial(pairs, 6), ((np.zeros((1, 8, 32)),) * 2, np.zeros((1, 2)))
    facts, machine = facts_of(build, None), machines.find("a100")
    (wanted,) = (each for each in candidates(4, host=2) if str(each) == WANTED)
    planned = search.plan_candidate(wanted, ROWS, machine, facts)
    job = Job(planned, (wanted.mesh,), Repeats.of(facts).runs_of(planned))
    assert [len(run.copied) for run in job.runs] == [2, 2]
    asked = TraceRequest(build, batch, ROWS)
    (some,), (full,) = steps([job, attrs.evolve(job, runs=())], asked, machine, facts)
    assert set(some.work) == set(full.work)
    assert set(some.collectives) == set(full.collectives)
    assert some.memory == full.memory


def test_blocks_with_generated_names_are_traced_once():
    keras.utils.clear_session(free_memory=False)
    facts, machine = facts_of(unnamed, None), machines.find("a100")
    for policy in ("fully_sharded", "sequence_parallel"):
        (wanted,) = (
            each
            for each in candidates(2, host=2)
            if each.policy == policy and each.batch_parts == (2 if policy == "fully_sharded" else 1)
        )
        planned = search.plan_candidate(wanted, ROWS, machine, facts)
        job = Job(planned, (wanted.mesh,), Repeats.of(facts).runs_of(planned))
        assert [len(run.copied) for run in job.runs] == [2], policy
        asked = TraceRequest(unnamed, BATCHES[unnamed], ROWS)
        (some,), (full,) = steps([job, attrs.evolve(job, runs=())], asked, machine, facts)
        assert (set(some.work), set(some.collectives)) == (set(full.work), set(full.collectives)), (
            policy
        )
        assert some.memory == full.memory, policy
