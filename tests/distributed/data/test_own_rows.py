"""Loops outside `fit` whose ranks give their own rows, or give different batches by mistake."""

import os
from functools import partial

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardcore
from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.domain.errors import RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.normal(size=(24, 3)).astype("float32")
LOSS = keras.losses.MeanSquaredError()


def data_parallel(**options):
    shardcore.install()
    keras.distribution.set_distribution(keras.distribution.DataParallel(**options))


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    )


def by_keras(trained, steps):
    optimizer, losses = keras.optimizers.SGD(0.1, momentum=0.9), []
    for x, y in steps:
        trained.zero_grad()
        losses.append(LOSS(y, trained(x, training=True)))
        losses[-1].backward()
        with torch.no_grad():
            optimizer.apply(
                [v.value.grad for v in trained.trainable_variables], trained.trainable_variables
            )
    return losses


def by_torch(trained, steps):
    optimizer, losses = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9), []
    for x, y in steps:
        optimizer.zero_grad()
        losses.append(LOSS(y, trained(x, training=True)))
        losses[-1].backward()
        optimizer.step()
    return losses


LOOPS = {"Keras": by_keras, "torch": by_torch}


def results(trained, losses):
    weights = {f"weight {n}": v.numpy() for n, v in enumerate(trained.weights)}
    return as_arrays({"losses": [float(loss.detach()) for loss in losses], **weights})


def loader(rank, ranks, rows):
    """The batches of a rank, as PyTorch's users write it."""
    data = TensorDataset(torch.tensor(X), torch.tensor(Y))
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
    return DataLoader(data, rows // ranks, sampler=sampler)


def global_batches(rows):
    """The batches of all ranks together; a sampler gives rank 0 the even rows."""
    for start in range(0, len(X), rows):
        chosen = [*range(start, start + rows, 2), *range(start + 1, start + rows, 2)]
        yield X[chosen], Y[chosen]


@pytest.mark.parametrize("loop", LOOPS)
def test_plain_batches_are_the_rows_of_each_rank_without_auto_sharding(loop):
    def program(rank):
        data_parallel(auto_shard_dataset=False)
        trained = model()
        return results(trained, LOOPS[loop](trained, loader(rank, 2, 8)))

    trained = model()
    expected = results(trained, LOOPS[loop](trained, global_batches(8)))
    assert_close(run_ranks(program, 2), expected)


def test_fit_takes_a_loader_with_a_sampler():
    def program(rank):
        data_parallel(auto_shard_dataset=False)
        trained = model()
        trained.compile("sgd", "mse")
        return trained.fit(loader(rank, 2, 8), epochs=2, shuffle=False, verbose=0).history[
            "loss"
        ], trained.get_weights()

    trained = model()
    trained.compile("sgd", "mse")
    chosen = np.concatenate([x for x, _ in global_batches(8)])
    targets = np.concatenate([y for _, y in global_batches(8)])
    losses = trained.fit(chosen, targets, 8, epochs=2, shuffle=False, verbose=0).history["loss"]
    for found_losses, weights in run_ranks(program, 2):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        for found, expected in zip(weights, trained.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("update", [0, 2])
def test_ranks_with_different_batches_are_an_error_at_the_update(loop, update):
    def program(rank):
        data_parallel()
        trained = model()
        steps = [(X[n : n + 4], Y[n : n + 4]) for n in (0, 4, 8)]
        steps[update] = (X[8 * rank : 8 * rank + 4], Y[:4])
        done = LOOPS[loop](trained, steps[:update])
        before = trained.get_weights()
        with pytest.raises(RankMismatchError) as refused:
            LOOPS[loop](trained, steps[update:])
        same = all(map(np.array_equal, before, trained.get_weights()))
        return len(done), same, str(refused.value)

    for done, same, message in run_ranks(program, 2):
        assert (done, same) == (update, True)
        assert "Ranks disagree on plain input 0 of 'sequential" in message
        assert f"call {update + 1} in a loop: rank 1 has shape (4, 6) float32, content" in message
        assert "shardcore.ensure_dtensor_input" in message


def test_only_the_inputs_of_gradients_are_compared_and_only_at_first(monkeypatch):
    def program(rank):
        data_parallel()
        trained = model()
        gathered = []
        processes = shardcore.bootstrap.installation().binding.processes
        original = type(processes).gather
        monkeypatch.setattr(
            type(processes),
            "gather",
            lambda self, fact: gathered.append(fact) or original(self, fact),
        )
        for _ in range(1 + rank):  # without a backward, each rank may look at other rows
            trained(X[rank : rank + 2])
            with torch.no_grad():
                trained(X[rank : rank + 3])
        by_torch(trained, [(X[:4], Y[:4])] * 5)
        return len(gathered), trained.get_weights()

    (first, weights), (second, others) = run_ranks(program, 2)
    assert (first, second) == (3, 3)
    assert all(map(np.array_equal, weights, others))


def test_inputs_that_the_user_laid_out_are_left_alone():
    def program(rank):
        data_parallel(auto_shard_dataset=False)
        trained = model()
        rows = [shardcore.ensure_dtensor_input(each) for each in loader(rank, 2, 8)]
        return results(trained, by_torch(trained, rows))

    trained = model()
    expected = results(trained, by_torch(trained, global_batches(8)))
    assert_close(run_ranks(program, 2), expected)


def test_a_group_of_the_script_is_adopted_where_the_launcher_set_no_address():
    port = free_port()

    def program(rank):
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
            os.environ.pop(name, None)
        os.environ["WORLD_SIZE"] = "2"
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        data_parallel()
        return len(keras.distribution.list_devices()), dist.get_rank()

    assert run_ranks(program, 2, init=False) == [(2, 0), (2, 1)]


def train_alone(rank, ranks, caplog):
    shardcore.install()
    os.environ["WORLD_SIZE"] = str(ranks)
    trained = model()
    trained.compile("sgd", "mse")
    with caplog.at_level("WARNING", "shardcore.session"):
        for _ in range(2):
            trained.fit(X, Y, batch_size=8, verbose=0)
    return [each.getMessage() for each in caplog.records if each.name == "shardcore.session"]


def test_ranks_without_a_distribution_are_told_once(caplog):
    for messages in run_ranks(partial(train_alone, ranks=2, caplog=caplog), 2, init=False):
        assert len(messages) == 1
        assert "each of the 2 processes runs the full model by itself" in messages[0]
        assert "keras.distribution.DataParallel()" in messages[0]
