"""The collectives of a step that is traced without values, beside those of real ranks."""

import multiprocessing
from collections import Counter
from functools import partial

import attrs
import keras
import numpy as np
import pytest
from keras import layers

import shardcore
from shardcore.binding.planning.make_plan import facts_of
from shardcore.bootstrap import machines
from shardcore.bootstrap.search import search
from shardcore.bootstrap.search.repeats import Repeats, priced_steps
from shardcore.bootstrap.search.traces import Job, PlannedCandidate, TraceRequest, steps
from shardcore.domain.mesh import Mesh
from shardcore.policies.candidates import Candidate, candidates
from shardcore.policies.layers.groups import layer_groups
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


class Pair(layers.Layer):
    """Up, and down."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(256, activation="relu", name="up")
        self.down = layers.Dense(96, name="down")

    def call(self, x):
        return self.down(self.up(x))


def mlp():
    """Six equal blocks: a trace has four of them."""
    x = h = keras.Input((96,))
    for number in range(6):
        h = Pair(name=f"pair_{number}")(h)
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


def norms():
    """Three equal kernels, of 1 MiB each, that are in no pair."""
    x = h = keras.Input((512,))
    for name in ("first", "second", "third"):
        h = layers.LayerNormalization(name=f"{name}_norm")(layers.Dense(512, name=name)(h))
    model = keras.Model(x, h)
    model.compile("adam", "mse", jit_compile=False)
    return model


class Unnamed(layers.Layer):
    """A block whose layers have the names that Keras counts on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.up = layers.Dense(128, activation="relu")
        self.down = layers.Dense(32)

    def call(self, x):
        return x + self.down(self.up(self.norm(x)))


def unnamed():
    x = h = keras.Input((8, 32))
    for number in range(6):
        h = Unnamed(name=f"block_{number}")(h)
    model = keras.Model(x, layers.Dense(32, name="head")(h))
    model.compile("adam", "mse", jit_compile=False)
    return model


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


class Scale(layers.Layer):
    """A weight of half a MiB, which the backward pass reads again."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(2**17,), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


SCALES = 56  # 28 MiB


def scales():
    x = h = keras.Input((2**17,))
    for number in range(SCALES):
        h = Scale(name=f"scale_{number}")(h)
    model = keras.Model(x, h)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


TOKENS = np.zeros((ROWS, 16), "int32")
NUMBERS = np.zeros((ROWS, 96), "float32")
GROUPS = np.zeros((ROWS, 8, 32), "float32")
WIDE = np.zeros((2, 2**17), "float32")
BATCHES = {
    decoder: (TOKENS, TOKENS),
    mlp: (NUMBERS, NUMBERS),
    experts: (GROUPS, GROUPS),
    norms: (np.zeros((ROWS, 512), "float32"),) * 2,
    unnamed: (GROUPS, GROUPS),
    scales: (WIDE, WIDE),
}


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
    priced = priced_steps([[each] for each in planned], asked, machine, Repeats.of(facts))
    return [
        (each.candidate, *moved_in(step)) for each, (step,) in zip(planned, priced, strict=True)
    ]


def moved_in(step):
    """Returns the number and the bytes of the collectives of a step, by kind."""
    calls, operand_bytes = Counter(), Counter()
    for moved in step.moved:
        kind = "all_to_all" if moved.kind == "send" else moved.kind
        calls[kind] += moved.times
        operand_bytes[kind] += moved.times * moved.operand_bytes
    return dict(calls), dict(operand_bytes)


def counted(_, build, asked):
    """Returns the collectives of a real rank, for each candidate."""
    found = []
    for candidate in asked:
        keras.utils.clear_session(free_memory=False)
        shardcore.install()
        mesh = keras.distribution.DeviceMesh(candidate.mesh.shape, candidate.mesh.axis_names)
        shardcore.plan(build, mesh, candidate.policy, **candidate.options).distribute()
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


def test_blocks_whose_small_weights_are_held_are_traced_once():
    keras.Input((1,))  # names are counted on from here
    facts, machine = facts_of(scales, None), machines.find("a100")
    (wanted,) = (each for each in candidates(2, host=2) if each.policy == "fully_sharded")
    planned, repeats = search.with_rules(wanted, 2, machine, facts), Repeats.of(facts)
    assert [len(run.traced) for run in repeats.under(planned)] == [4]
    asked = TraceRequest(scales, BATCHES[scales], 2)
    ((step,),) = priced_steps([[planned]], asked, machine, repeats)
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
    planned = search.with_rules(wanted, 2, machine, facts)
    job = Job(planned, (wanted.mesh,), Repeats.of(facts).under(planned))
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
    planned = search.with_rules(wanted, ROWS, machine, facts)
    job = Job(planned, (wanted.mesh,), Repeats.of(facts).under(planned))
    assert [len(run.copied) for run in job.runs] == [2, 2]
    asked = TraceRequest(build, batch, ROWS)
    (some,), (full,) = steps([job, attrs.evolve(job, runs=())], asked, machine, facts)
    assert set(some.work) == set(full.work)
    assert set(some.moved) == set(full.moved)
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
        planned = search.with_rules(wanted, ROWS, machine, facts)
        job = Job(planned, (wanted.mesh,), Repeats.of(facts).under(planned))
        assert [len(run.copied) for run in job.runs] == [2], policy
        asked = TraceRequest(unnamed, BATCHES[unnamed], ROWS)
        (some,), (full,) = steps([job, attrs.evolve(job, runs=())], asked, machine, facts)
        assert (set(some.work), set(some.moved)) == (set(full.work), set(full.moved)), policy
        assert some.memory == full.memory, policy


@pytest.mark.parametrize("policy", ["fully_sharded", "tensor_parallel"])
def test_the_parts_of_the_layers_make_up_the_step(policy):
    facts, machine = facts_of(mlp, None), machines.find("a100")
    repeats, mesh = Repeats.of(facts), Mesh((1, 2, 2), ("replica", "shard", "model"))
    candidate = Candidate("per_layer", mesh, 2, {"otherwise": policy})
    planned = search.with_rules(candidate, ROWS, machine, facts)
    groups = {path: group[0] for group in layer_groups(facts) for path in group}
    asked = TraceRequest(mlp, BATCHES[mlp], ROWS, groups)
    ((step,),) = priced_steps([[planned]], asked, machine, repeats)
    without = attrs.evolve(asked, groups={})
    ((same,),) = priced_steps([[planned]], without, machine, repeats)
    assert (set(step.work), set(step.moved)) == (set(same.work), set(same.moved))
    assert step.memory == same.memory
    assert step.layers.keys() == {"pair_0", ""}
    for name in ("flops", "bytes"):
        total, rest, of_blocks = (
            sum(each.times * getattr(each, name) for each in part.work)
            for part in (step, step.layers[""], step.layers["pair_0"])
        )
        assert rest + of_blocks == total
        assert rest < total / 20  # the batch, and the loss
    moved, rest, of_blocks = (
        moved_in(each)[1] for each in (step, step.layers[""], step.layers["pair_0"])
    )
    assert moved == dict(Counter(rest) + Counter(of_blocks))
    assert not rest or max(rest.values()) < 100  # the sum of the loss


def test_as_many_layers_are_sharded_as_the_memory_asks_for():
    options = {"batch": BATCHES[norms], "machine": "a100"}
    sharded = {}
    for memory in ("17MiB", "15.5MiB"):
        plan = shardcore.plan(norms, devices=2, policy="auto", memory=memory, **options)
        found = {each.policy: each for each in plan.ranking.priced}
        best, every = found["per_layer"], found["fully_sharded"]
        assert best.cost.seconds < every.cost.seconds
        assert "data_parallel" not in found  # which needs 18 MiB
        assert best.options["otherwise"] == "data_parallel"
        sharded[memory] = best.options["layers"]
        assert "fully_sharded in first" in str(plan.ranking)
    assert [len(each) for each in sharded.values()] == [1, 2]
    wanted = Candidate("per_layer", best.mesh, 2, best.options)
    planned = search.with_rules(wanted, ROWS, machines.find("a100"), facts_of(norms, None))
    asked = TraceRequest(norms, BATCHES[norms], ROWS)
    repeats = Repeats.of(facts_of(norms, None))
    ((step,),) = priced_steps([[planned]], asked, machines.find("a100"), repeats)
    for found in run_ranks(counted, 2, norms, [wanted]):
        assert found == [(wanted, *moved_in(step))]


def test_a_layout_of_the_table_has_the_options_with_which_it_was_priced():
    options = {"batch": BATCHES[decoder], "machine": "a100", "memory": "1GB"}
    ranking = shardcore.plan(decoder, devices=4, policy="auto", **options).ranking
    (both,) = (each for each in ranking.priced if each.mesh.axis_names == ("data", "seq", "model"))
    assert both.options == {"axis": "seq", "tensor": "model"}


def test_all_layouts_of_a_search_share_one_built_model():
    built = multiprocessing.get_context("fork").Value("i", 0)

    def build():
        with built.get_lock():
            built.value += 1
        return mlp()

    options = {"batch": BATCHES[mlp], "memory": "1GB"}
    plan = shardcore.plan(build, devices=2, policy="auto", **options)
    assert len(plan.ranking.priced) > 3
    # For its facts; for a copy of a block, and the block that it is compared with; for one policy
    # for all layers; and to divide steps among layers.
    assert built.value == 5
