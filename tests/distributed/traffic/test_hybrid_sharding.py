"""Hybrid sharding: shards within a group of ranks, replicas across groups, rows over both axes."""

import keras
import numpy as np
import pytest
from keras import layers

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(26, 8)).astype("float32")
Y = RNG.normal(size=(26, 4)).astype("float32")
ROWS = ("replica", "shard")
MESHES = {4: ((2, 2), ROWS), 8: ((2, 2, 2), (*ROWS, "model"))}


def build():
    x = keras.Input((8,), name="x")
    h = layers.Dense(16, activation="tanh", name="up")(x)
    return keras.Model(x, layers.Dense(4, name="down")(h))


def distributed(ranks, strategy="dtensor", **options):
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh(*MESHES[ranks])
    plan = shardcore.plan(build, mesh, "hybrid_sharded", small=0)
    assert plan.batch_dim_name == ROWS
    parallel = keras.distribution.ModelParallel(layout_map=plan, batch_dim_name=ROWS, **options)
    keras.distribution.set_distribution(parallel)
    return parallel


def train(rows=slice(None), batch_size=10):
    """Trains on batches of 10, 10 and 6 rows: 4 groups of ranks get unequal numbers of them."""
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    data = X[rows], Y[rows]
    history = model.fit(*data, batch_size=batch_size, epochs=3, shuffle=False, verbose=0)
    weights = {each.path: keras.ops.convert_to_numpy(each) for each in model.variables}
    return {"loss": np.array(history.history["loss"]), **weights}


def on_ranks(rank, ranks, strategy):
    parallel = distributed(ranks, strategy)
    assert getattr(parallel, "num_model_replicas", 4) == 4  # a property since Keras 3.15
    trained = train()
    parts = {v.path: v.bytes_here for v in shardcore.verify(build()).variables}
    return trained, parts


@pytest.fixture(scope="module")
def one_device():
    return run_ranks(lambda rank: train(), 1)[0]


@pytest.mark.parametrize(("ranks", "strategy"), [(4, "dtensor"), (4, "manual"), (8, "dtensor")])
def test_hybrid_sharding_gives_the_numbers_of_one_device(ranks, strategy, one_device):
    for trained, parts in run_ranks(on_ranks, ranks, ranks, strategy):
        assert_close([trained], one_device)
        # kernels of 8 x 16 and 16 x 4, biases of 16 and 4: half of each, or a quarter
        kernels = 2 if ranks == 4 else 4
        assert parts["up/kernel"] == 8 * 16 * 4 // kernels
        assert parts["down/kernel"] == 16 * 4 * 4 // kernels
        assert parts["down/bias"] == 4 * 4 // 2


def test_each_process_gives_the_rows_of_its_place_along_both_axes(one_device):
    def own_rows(rank):
        parallel = distributed(4, auto_shard_dataset=False)
        place = getattr(parallel, "data_shard_id", rank)  # a property since Keras 3.15
        rows = [
            n for start in range(0, 24, 8) for n in range(start + 2 * place, start + 2 * place + 2)
        ]
        return place, train(np.array(rows), 2)

    def all_rows(rank):
        return train(slice(24), 8)

    (expected,) = run_ranks(all_rows, 1)
    for rank, (place, trained) in enumerate(run_ranks(own_rows, 4)):
        assert place == rank
        assert_close([trained], expected)


def test_gradients_are_scattered_within_a_group_and_their_shards_summed_across():
    def step(rank):
        distributed(4)
        model = build()
        model.compile("sgd", "mse")
        return shardcore.explain(model, (X[:8], Y[:8])).collectives

    bytes_of = {
        "up/kernel": 8 * 16 * 4,
        "up/bias": 16 * 4,
        "down/kernel": 16 * 4 * 4,
        "down/bias": 16,
    }
    for collectives in run_ranks(step, 4):
        backward = [each for each in collectives if each.phase == "backward"]
        scattered = {e.variables[0]: e for e in backward if e.kind == "reduce_scatter"}
        summed = {e.variables[0]: e for e in backward if e.kind == "all_reduce"}
        assert {name: e.operand_bytes for name, e in scattered.items()} == bytes_of
        assert {name: e.operand_bytes * 2 for name, e in summed.items()} == bytes_of
        assert {e.axes for e in scattered.values()} == {("shard",)}
        assert {e.axes for e in summed.values()} == {("replica",)}
        assert {e.axes for e in collectives if e.kind == "all_gather"} == {("shard",)}
