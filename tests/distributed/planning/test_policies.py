"""Policies on real ranks: the numbers of one device, the bytes of the plan, what is reduced."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import CASES, Block, cnn, decoder, grouped, mixture
from tests.distributed.programs import AXES, is_seed


def distribute(build, mesh, policy, options, strategy="dtensor"):
    """Sets the distribution of a plan, as a user would; gives the plan."""
    shardcore.install(strategy)
    device_mesh = keras.distribution.DeviceMesh(mesh, AXES)
    plan = shardcore.plan(build, device_mesh, policy, **options)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=plan, batch_dim_name="data")
    )
    return plan


def train(build):
    """Two eager steps: the second has the sums of momentum."""
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss if build is decoder else "mse", jit_compile=False)
    losses = [model.train_on_batch(*CASES[build]) for _ in range(2)]
    return model, {"losses": np.array(losses)} | {v.path: v.numpy() for v in model.variables}


def every_case(rank, ways, strategy="dtensor"):
    """Each way of training: the numbers, and the bytes stored and planned."""
    found = {}
    for build, mesh, policy in ways:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        options = {} if policy == "data_parallel" else {"small": 0}
        options |= {"shard": "model"} if policy == "context_parallel" else {}
        plan = distribute(build, mesh, policy, options, strategy) if mesh else None
        model, values = train(build)
        found[build.__name__, mesh, policy] = values, plan and stored(model, plan)
    return found


def stored(model, plan):
    """The bytes of the variables here, and what the plan says of the fullest rank."""
    report = shardcore.verify(model)
    assert report.ok
    assert not shardcore.rules_report(model).unused_rules
    assert not shardcore.rules_report(model).unmatched_paths
    paths = {v.path for v in model.variables}
    here = {each.path: each.bytes_here for each in report.variables if each.path in paths}
    return sum(here[path] for path in here if not is_seed(path)), plan.report().bytes_here


WAYS = {
    ("dtensor", 2): [
        (decoder, (2, 1), "data_parallel"),
        *((build, (2, 1), "fully_sharded") for build in (cnn, decoder)),
        *((build, (1, 2), "tensor_parallel") for build in CASES),
        (grouped, (1, 2), "sequence_parallel"),
        (mixture, (1, 2), "context_parallel"),
    ],
    ("manual", 2): [(cnn, (2, 1), "fully_sharded"), (decoder, (1, 2), "tensor_parallel")],
    ("dtensor", 4): [
        (cnn, (2, 2), "fully_sharded"),
        (decoder, (2, 2), "tensor_parallel"),
        (decoder, (1, 4), "sequence_parallel"),  # 6 tokens over 4 ranks
    ],
}


@pytest.fixture(scope="module")
def one_device():
    (found,) = run_ranks(every_case, 1, [(build, None, None) for build in CASES])
    return {name: values for (name, _, _), (values, _) in found.items()}


@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
def test_each_policy_gives_the_numbers_of_one_device_and_the_bytes_of_its_plan(
    strategy, ranks, one_device
):
    results = run_ranks(every_case, ranks, WAYS[strategy, ranks], strategy, timeout=250)
    for (name, mesh, policy), (values, (_, planned)) in results[0].items():
        for path, expected in one_device[name].items():
            np.testing.assert_allclose(
                values[path], expected, rtol=1e-4, atol=1e-5, err_msg=f"{name} {policy} {path}"
            )
        here = [each[name, mesh, policy][1][0] for each in results]
        assert max(here) == planned, f"{name} {policy} on {mesh}"
        paths = [path for path in one_device[name] if path != "losses" and not is_seed(path)]
        whole = sum(one_device[name][path].nbytes for path in paths)
        parts = {"data_parallel": 1, "fully_sharded": mesh[0]}.get(policy, mesh[1])
        # Almost all of each of these models is sharded; what is whole is small.
        assert whole / parts <= planned < whole * (1 / parts + (parts > 1) / 4) + 1


# --- what moves -----------------------------------------------------------------------------------


def float_blocks():
    x = keras.Input((6, 16))
    h = x
    for number in range(2):
        h = Block(16, 4, name=f"block_{number}")(h)
    return keras.Model(x, h)


def divided():
    return grouped(key_heads=2)


# The all-reduces of a step on a mesh (1, 2).
REDUCTIONS = {
    # In each of two blocks, attention and hidden layers sum up once forward, and once backward.
    float_blocks: 8,
    # The gradients of key and value, which are whole, are summed up over the query heads too.
    grouped: 6,
    divided: 4,
}


def test_tensor_parallel_blocks_reduce_four_times():
    def program(rank):
        found = {}
        for build in REDUCTIONS:
            distribute(build, (1, 2), "tensor_parallel", {"small": 0})
            model = build()
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
            model.train_on_batch(*CASES[grouped])
            with count_collectives() as traffic:
                model.train_on_batch(*CASES[grouped])
            found[build.__name__] = dict(traffic.calls)
        return found

    expected = {build.__name__: {"all_reduce": count} for build, count in REDUCTIONS.items()}
    assert run_ranks(program, 2) == [expected] * 2
