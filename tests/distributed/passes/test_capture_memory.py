"""The peak memory of a captured step, in the bytes that torch allocates and frees."""

import keras
import torch

from shardcore.adapters.capture.passes.collectives import with_late_waits
from shardcore.adapters.capture.passes.memory import with_operands_reused
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.testing import run_ranks
from tests.traces import highest


def gathering(_rank):
    """Of each call of a step, how many operands it writes; one that it sends is read meanwhile."""
    collectives = torch.ops._c10d_functional
    group = torch.distributed.group.WORLD.group_name

    def step(x):
        total = x.repeat(8, 1).sum()  # there is room for an operand on its way
        made = x + 1
        gathered = collectives.all_gather_into_tensor(made, 2, group)
        return made * 2, collectives.wait_tensor(gathered), total

    x = torch.randn(512, 512)
    recorder = Recorder([x])
    recorder.run(lambda: step(x))
    calls = with_operands_reused(with_late_waits(recorder.trace)).calls
    return [len(call.writes) for call in calls if call.operator.__name__.startswith("mul")]


def test_an_operand_of_a_running_collective_is_not_overwritten():
    assert run_ranks(gathering, 2) == [[0], [0]]


def decoder(jit_compile):
    """A small language model: logits are the largest tensors of its step."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(1024, 16)(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = x + keras.layers.Dense(16)(keras.layers.Dense(64, activation="gelu")(x))
    model = keras.Model(tokens, keras.layers.Dense(1024)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit_compile)
    return model


def fitted(_rank, jit_compile):
    """The highest of a step, and the weights after some."""
    import shardcore

    shardcore.install()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = decoder(jit_compile)
    batch = torch.randint(0, 1024, (16, 33), generator=torch.Generator().manual_seed(0)).numpy()
    x, y = batch[:, :-1], batch[:, 1:]
    model.fit(x, y, batch_size=16, epochs=6, verbose=0)
    held = highest(lambda: model.fit(x, y, batch_size=16, verbose=0))
    return held, model.get_weights()


def test_a_step_of_a_language_model_holds_less_captured():
    logits = 4 * 8 * 32 * 1024  # of a rank
    (eager, weights), *_ = run_ranks(fitted, 2, False)
    (captured, own), *_ = run_ranks(fitted, 2, "auto")
    assert captured <= eager - logits
    for one, other in zip(weights, own, strict=True):
        assert (one == other).all()
