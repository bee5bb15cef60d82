"""Helpers for the programs of distributed tests: distributions, readings, comparisons."""

import os
import shutil

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.ranks.job import devices
from shardcore.testing import RankFailed, run_ranks

# What the tests run under; `SHARDCORE_TEST_STRATEGY=manual pytest tests/distributed` has the other.
STRATEGY = os.environ.get("SHARDCORE_TEST_STRATEGY", "dtensor")
# For statements of tests that hold for DTensor only: see docs/explanation/manual.md.
only_dtensor = pytest.mark.skipif(STRATEGY != "dtensor", reason="it is about DTensor")
AXES = ("data", "model")


# For what a GPU does otherwise. A process that asks it for more than its presence cannot fork.
IS_ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_ON_GPU else "cpu"
# Whether two ranks have NCCL: it lets them share a GPU if asked to.
HAS_NCCL = IS_ON_GPU and (
    torch.cuda.device_count() > 1 or os.environ.get(devices.NCCL_SHARES_VARIABLE) == "1"
)


def needs_compiler(test):
    """Marks a test that runs Inductor on a CPU."""
    has_one = any(map(shutil.which, ("g++", "clang++")))
    skips = pytest.mark.skipif(not has_one, reason="Inductor needs a C++ compiler on a CPU")
    return skips(pytest.mark.usefixtures("loaded_inductor")(test))


def distribute(shape, rules=None, *, axis_names=AXES, auto_shard_dataset=True, strategy=STRATEGY):
    """Sets `ModelParallel` over a mesh of `shape`, as a user would; gives the distribution."""
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh(shape, axis_names)
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, spec in (rules or {}).items():
        layout_map[path] = spec
    distribution = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="data", auto_shard_dataset=auto_shard_dataset
    )
    keras.distribution.set_distribution(distribution)
    return distribution


def distribute_by_policy(build, shape, policy, strategy=STRATEGY):
    """Sets the layouts that a policy makes for the model of `build`, those of small weights too."""
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh(shape, AXES)
    options = {} if policy == "data_parallel" else {"small": 0}
    plan = shardcore.plan(build, mesh, policy, **options)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=plan, batch_dim_name="data")
    )


def at_place(shape, rank):
    """The coordinate of `rank` in a mesh of `shape`: ranks are counted row by row."""
    return tuple(int(index) for index in np.unravel_index(rank, shape))


def local(variable):
    """The local shard of `variable`, as an array."""
    value = variable._value.detach()
    return value.to_local().cpu().numpy().copy()


def local_shapes(variables):
    """The shapes of the local shards of `variables`."""
    return {v.path: local(v).shape for v in variables}


def placements(tensor):
    """The placements of `tensor` as they print, such as "S(0) R"; "plain" for a plain tensor."""
    sharded = isinstance(tensor, ShardedTensor)
    return " ".join(map(str, tensor.placements)) if sharded else "plain"


def as_arrays(result):
    """`result`, a nest of tensors and numbers, as NumPy arrays that leave the rank."""
    return keras.tree.map_structure(
        lambda leaf: keras.ops.convert_to_numpy(leaf) if torch.is_tensor(leaf) else leaf, result
    )


def assert_close(results, reference, atol=1e-5):
    """Each rank's dict of values is that of the reference, name by name.

    A GPU sums the products of a part in another order than those of all.
    """
    atol = 2 * atol if IS_ON_GPU else atol
    for rank, result in enumerate(results):
        assert result.keys() == reference.keys()
        for name, value in result.items():
            np.testing.assert_allclose(
                value, reference[name], rtol=0, atol=atol, err_msg=f"rank {rank}: {name}"
            )


def assert_fails_everywhere(program, world_size, *args, error, match, timeout=30):
    """`program` raises `error` on every rank, with `match` in its message."""

    def attempt(rank):
        with pytest.raises(error, match=match):
            program(rank, *args)

    try:
        run_ranks(attempt, world_size, timeout=timeout)
    except RankFailed as failed:  # without the chain of every rank's own
        raise AssertionError(str(failed)) from None


def is_seed(path):
    """Whether it is the path of the state of a seed generator, which no plan has a rule for."""
    return path.endswith("seed_generator_state")
