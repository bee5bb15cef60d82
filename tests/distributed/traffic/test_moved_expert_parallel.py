"""Policy `expert_parallel`: the numbers of one device, what moves, and what each rank stores.

Eager and captured steps are compared with one device in the same run, and their collectives and
bytes with the sizes of the model alone.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import RNG
from tests.distributed.programs import STRATEGY
from tests.distributed.traffic.moved import assert_same, numbers

GROUPS, LENGTH, WIDTH, HIDDEN, CAPACITY = 8, 6, 8, 64, 2
X, Y = (RNG.normal(size=(GROUPS, LENGTH, WIDTH)).astype("float32") for _ in range(2))


class Mixture(layers.Layer):
    """A mixture of experts with a router, each token to one of them.

    Args:
        way: The name of the method that sends tokens to experts and back.
        experts: The number of experts.
    """

    def __init__(self, way, experts, **kwargs):
        super().__init__(**kwargs)
        self.way, self.experts = way, experts
        self.router = layers.Dense(experts, use_bias=False, name="router")

    def build(self, shape):
        self.router.build(shape)
        into, out = (self.experts, WIDTH, HIDDEN), (self.experts, HIDDEN, WIDTH)
        self.gate = self.add_weight(shape=into, name="gate")
        self.up = self.add_weight(shape=into, name="up")
        self.up_bias = self.add_weight(shape=into[::2], name="up_bias", initializer="ones")
        self.down = self.add_weight(shape=out, name="down")

    def call(self, x):
        return getattr(self, self.way)(x)

    def computed(self, h):
        """The outputs of all experts for their tokens: (experts, ..., width)."""
        bias = ops.reshape(self.up_bias, (self.experts, *[1] * (len(h.shape) - 2), HIDDEN))
        gate = ops.silu(ops.einsum("e...d,edh->e...h", h, self.gate))
        up = ops.einsum("e...d,edh->e...h", h, self.up) + bias
        return ops.einsum("e...h,ehd->e...d", gate * up, self.down)

    def routed(self, x):
        """Per token the share of its expert, its expert, and its place there (from 0)."""
        shares = ops.softmax(self.router(x))
        chosen = ops.one_hot(ops.argmax(shares, -1), self.experts)
        return shares, chosen, (ops.cumsum(chosen, -2) - 1) * chosen

    def slots(self, chosen, place, capacity):
        """One for each token at its slot, (..., token, expert, slot): none for a dropped one."""
        at = place[..., None] == ops.arange(capacity, dtype="float32")
        return ops.cast(at, "float32") * chosen[..., None]

    def groups(self, x):
        """As GShard: the rows of a batch are groups, each with its capacity."""
        shares, chosen, place = self.routed(x)
        slots = self.slots(chosen, place, CAPACITY)
        h = self.computed(ops.einsum("gsec,gsd->egcd", slots, x))
        return ops.einsum("gsec,egcd->gsd", slots * shares[..., None], h)

    def one_group(self, x):
        """All tokens of the batch are one group."""
        x = ops.reshape(x, (-1, WIDTH))
        shares, chosen, place = self.routed(x)
        slots = self.slots(chosen, place, 2 * GROUPS)
        h = self.computed(ops.einsum("tec,td->ecd", slots, x))
        y = ops.einsum("tec,ecd->td", slots * shares[..., None], h)
        return ops.reshape(y, (-1, LENGTH, WIDTH))

    def indices(self, x):
        """As one group, by numbers of slots: the last slot gets the tokens that are dropped."""
        capacity, x = 2 * GROUPS, ops.reshape(x, (-1, WIDTH))
        shares, _, place = self.routed(x)
        expert, at = ops.argmax(shares, -1), ops.cast(ops.sum(place, -1), "int64")
        last = self.experts * capacity
        slot = ops.where(at < capacity, ops.cast(expert, "int64") * capacity + at, last)
        h = ops.segment_sum(x, slot, num_segments=last + 1)[:-1]
        h = self.computed(ops.reshape(h, (self.experts, capacity, WIDTH)))
        y = ops.take(ops.reshape(h, (last, WIDTH)), ops.minimum(slot, last - 1), axis=0)
        kept = ops.cast(at < capacity, "float32") * ops.max(shares, -1)
        return ops.reshape(y * kept[:, None], (-1, LENGTH, WIDTH))

    def dense(self, x):
        """As keras-hub: every expert computes all tokens."""
        x = ops.reshape(x, (-1, WIDTH))
        shares = ops.softmax(self.router(x))
        gate = ops.silu(ops.einsum("td,edh->eth", x, self.gate))
        up = ops.einsum("td,edh->eth", x, self.up) + self.up_bias[:, None]
        y = ops.einsum("eth,ehd->etd", gate * up, self.down)
        y = ops.sum(y * ops.transpose(shares)[..., None], axis=0)
        return ops.reshape(y, (-1, LENGTH, WIDTH))


def trained(way, experts, mesh=None, captured=False, strategy=STRATEGY):
    """The numbers after two steps, or six of which the last is captured.

    Also what the second step, the last one and a step of evaluation move, and what a rank stores.
    """

    def build():
        x = keras.Input((LENGTH, WIDTH))
        h = layers.Dense(WIDTH, name="before")(x)
        return keras.Model(x, Mixture(way, experts, name="mixture")(h))

    keras.utils.clear_session(free_memory=False)
    if mesh:
        shardcore.install(strategy)
        axes = ("data", "expert")[: len(mesh)]
        plan = shardcore.plan(
            build, keras.distribution.DeviceMesh(mesh, axes), "expert_parallel", small=0
        )
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=plan, batch_dim_name=plan.batch_dim_name)
        )
    keras.utils.set_random_seed(1)
    model = build()
    model.compile("adam", "mse", jit_compile="auto" if captured else False)
    model.train_on_batch(X, Y)
    moved = []
    for _ in range(5 if captured else 1):
        with count_collectives() as traffic:
            logs = model.train_on_batch(X, Y, return_dict=True)
        moved.append(traffic)
    with count_collectives() as evaluated:
        model.test_on_batch(X, Y)
    found = numbers(model, logs)
    if not mesh:
        return found
    stored = {v.path: v.bytes_here for v in shardcore.verify(model).variables}
    return (
        found,
        [dict(each.operand_bytes) for each in (moved[0], moved[-1], evaluated)],
        [each.calls["all_to_all"] for each in (moved[0], moved[-1], evaluated)],
        stored,
    )


# By name: the way, the number of experts, the mesh, and whether steps are captured.
CASES = {
    2: {
        "groups": ("groups", 4, (2,), True),
        "uneven": ("groups", 3, (2,)),
        "one group": ("one_group", 4, (2,)),
        "indices": ("indices", 4, (2,)),
        "dense": ("dense", 4, (2,)),
    },
    4: {"groups of ranks": ("groups", 4, (2, 2))},
}


def on_one_device(rank, ranks):
    cases = CASES[ranks].items()
    return {name: trained(*case[:2], None, *case[3:]) for name, case in cases}


def on_ranks(rank, ranks):
    return {name: trained(*case) for name, case in CASES[ranks].items()}


def bank(experts):
    """The bytes of so many experts."""
    return 4 * experts * (3 * WIDTH * HIDDEN + HIDDEN)


def others(experts):
    """The bytes of all other variables."""
    return 4 * (WIDTH * WIDTH + WIDTH + WIDTH * experts)


@pytest.fixture(scope="module", params=CASES)
def results(request):
    """By name: the case, the numbers of one device, and what each rank found."""
    (expected,) = run_ranks(on_one_device, 1, request.param)
    found = run_ranks(on_ranks, request.param, request.param, timeout=200)
    return {
        name: (case, expected[name], [each[name] for each in found])
        for name, case in CASES[request.param].items()
    }


def test_each_way_has_the_numbers_of_one_device(results):
    for name, (_, expected, ranks) in results.items():
        for found, *_ in ranks:
            assert_same(found, expected, name)


def test_each_rank_stores_its_experts_and_their_moments(results):
    for name, ((_, experts, mesh, *_), _, ranks) in results.items():
        stored = [
            sum(
                size
                for path, size in each[-1].items()
                if "mixture" in path and "router" not in path
            )
            for each in ranks
        ]
        parts = [len(part) for part in np.array_split(np.arange(experts), mesh[-1])]
        # Each expert has a value and two moments of Adam.
        assert stored == [3 * bank(part) for part in parts] * (len(ranks) // mesh[-1]), name


def test_groups_of_tokens_are_exchanged_and_experts_are_not_moved(results):
    evenly = {"groups", "groups of ranks"} & results.keys()
    for (_, experts, mesh, *_), _, ranks in (results[name] for name in evenly):
        tokens = 4 * experts * GROUPS * CAPACITY * WIDTH // np.prod(mesh)
        # On two axes each group of ranks has all experts: their gradients are summed over groups.
        of_experts = bank(experts) // mesh[-1] if len(mesh) > 1 else 0
        reduced = of_experts + len(mesh) * (others(experts) + 4)
        step = {"all_to_all": 4 * tokens, "all_reduce": reduced}
        for _, moved, exchanges, _ in ranks:
            # To the experts and back, forward and backward.
            assert exchanges == [4, 4, 2]
            assert moved == [
                step, step, {"all_to_all": 2 * tokens, "all_reduce": 4 * len(mesh)}
            ]  # fmt: skip


def test_tokens_of_one_group_are_summed_for_experts_and_the_experts_are_not_moved(results):
    if "one group" not in results:
        return
    (_, experts, _, *_), _, ranks = results["one group"]
    tokens = 4 * experts * 2 * GROUPS * WIDTH
    for _, (step, *_), _, _ in ranks:
        assert step == {
            # Into the slots, and the gradient of what is taken from them.
            "reduce_scatter": 2 * tokens,
            # What is taken from the slots, the gradient of them, and the places in them.
            "all_gather": 2 * tokens // 2 + 4 * experts,
            "all_reduce": others(experts) + 4,
        }


def test_all_tokens_are_gathered_for_experts_that_compute_all_of_them(results):
    if "dense" not in results:
        return
    (_, experts, _, *_), _, ranks = results["dense"]
    tokens, shares = 4 * GROUPS * LENGTH * WIDTH, 4 * GROUPS * LENGTH * experts
    for _, (step, *_), _, _ in ranks:
        assert step == {
            "all_gather": 2 * tokens // 2,  # the tokens, and the gradient of the output
            "reduce_scatter": 2 * tokens,  # the output, and the gradient of the tokens
            "all_to_all": 2 * shares // 2,  # the shares of experts, and the gradient of them
            "all_reduce": others(experts) + 4,
        }
