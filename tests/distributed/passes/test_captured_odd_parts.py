"""Ranks with parts of other sizes start the same collectives in their captured steps."""

from unittest import mock

import keras
import numpy as np

from shardcore.adapters.capture.running import program
from shardcore.binding.capture import step as captured_step
from shardcore.testing import run_ranks
from tests.distributed.traffic.moved import compiled, distribute, numbers

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(4, 4064)).astype("float32"), RNG.normal(size=(4, 2)).astype("float32")
RULES = {
    ".*odd/kernel": (None, "model"),
    ".*odd/bias": ("model",),
    ".*sum/kernel": ("model", None),
}


def wide():
    """Of 129 columns a rank has 65 or 64: the kernel's gradient is more than a MiB, or less."""
    dense = [keras.layers.Dense(129, name="odd"), keras.layers.Dense(2, name="sum")]
    return keras.Sequential([keras.Input((4064,)), *dense])


def trained(jit_compile):
    """The numbers of some steps, how many ran from a trace, and the bytes asked for."""
    keras.utils.clear_session(free_memory=False)
    ran, asked = [], []
    make, note = program.TraceCapture.program, captured_step.CacheEntry.note_run

    def made(self, *runs, all_reduces=None, **how):
        asked.append(all_reduces)
        return make(self, *runs, all_reduces=all_reduces, **how)

    def noted(attempt, it):
        ran.append([each.kind for each in it.collectives])
        note(attempt, it)

    distribute(wide, mesh=(2, 2), rules=RULES)
    with (
        mock.patch.object(program.TraceCapture, "program", made),
        mock.patch.object(captured_step.CacheEntry, "note_run", noted),
    ):
        model = compiled(wide, jit_compile=jit_compile)
        logs = [model.train_on_batch(X, Y, return_dict=True) for _ in range(5)][-1]
    return numbers(model, logs), ran, asked


def test_what_goes_together_is_decided_by_the_bytes_of_the_largest_part():
    ranks = run_ranks(lambda _: [trained(jit) for jit in (False, "auto")], 4, timeout=120)
    for (eager, never, _), (captured, ran, asked) in ranks:
        for name, value in eager.items():
            np.testing.assert_array_equal(captured[name], value, err_msg=name)
        assert (never, len(ran)) == ([], 3)
        (sent,) = asked  # by its own bytes no rank has a program that all have
        assert max(each.bytes for each in sent) == 4064 * 65 * 4
        assert asked == ranks[0][1][2]
        assert ran == ranks[0][1][1]
        # Forward one over the model axis; backward two buckets over the data axis.
        assert sum(kind.startswith("all_reduce") for kind in ran[0]) == 3
