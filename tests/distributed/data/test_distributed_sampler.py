"""A `DataLoader` whose `DistributedSampler` gives each rank its own rows, in `fit`."""

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardcore
from shardcore.domain.errors import RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close

RNG = np.random.default_rng(0)
DATA = TensorDataset(
    *(torch.as_tensor(RNG.normal(size=(22, each)).astype("float32")) for each in (6, 3))
)


def sampler(rank, ranks=2):
    return DistributedSampler(DATA, num_replicas=ranks, rank=rank, seed=3)


def train(loader, samplers):
    """`fit` with another order in each epoch, then `evaluate` and `predict`."""
    keras.utils.set_random_seed(1)
    trained = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    trained.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], jit_compile=False)
    reorder = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: [each.set_epoch(epoch) for each in samplers]
    )
    found = trained.fit(loader, epochs=2, callbacks=[reorder], shuffle=False, verbose=0).history
    found["evaluate"] = trained.evaluate(loader, verbose=0)
    found["predict"] = trained.predict(loader, verbose=0)
    return found | {str(number): each for number, each in enumerate(trained.get_weights())}


class Together(DataLoader):
    """The global batches of two ranks, in one process: four rows of each sampler."""

    def __init__(self, samplers):
        super().__init__(DATA, batch_sampler=list(range(3)))
        self.samplers = samplers

    def __iter__(self):
        first, second = (list(each) for each in self.samplers)
        for start in range(0, 11, 4):
            part = slice(start, start + 4)
            yield DATA[first[part] + second[part]]


@pytest.mark.parametrize("auto", [True, False])
def test_each_rank_s_rows_are_its_own(auto):
    def program(rank):
        shardcore.install()
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(auto_shard_dataset=auto)
        )
        own = sampler(rank)
        return train(DataLoader(DATA, 4, sampler=own), [own])

    def one_device(rank):
        samplers = [sampler(rank) for rank in range(2)]
        return train(Together(samplers), samplers)

    (expected,) = run_ranks(one_device, 1)
    assert_close(run_ranks(program, 2), expected)


def test_a_sampler_that_shards_otherwise_than_the_batch_axis_is_refused():
    def program(rank):
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        rules = keras.distribution.LayoutMap(mesh)
        keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=rules))
        said = rf"of rank {rank} of 2: give it num_replicas=1 and rank=distribution.data_shard_id"
        with pytest.raises(RankMismatchError, match=said):
            train(DataLoader(DATA, 4, sampler=sampler(rank)), [])

    run_ranks(program, 2)
