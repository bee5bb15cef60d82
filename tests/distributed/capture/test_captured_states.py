"""Steps of a real model go through every transition of `steps.capture`, and through no other."""

import cProfile
import itertools
from contextlib import nullcontext
from unittest import mock

import keras
import numpy as np
import pytest
import torch

from shardcore.adapters.capture.running.program import RecordedProgram, TraceCapture
from shardcore.adapters.capture.trace import Trace
from shardcore.binding.capture.cache import CacheEntry
from shardcore.domain.capture import TRANSITIONS, Event, Payback, State, TracesDiffer
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import (
    Spy,
    assert_equal,
    begin,
    compiled,
    is_real,
    messages,
    state,
)

X, Y = np.ones((8, 4), "float32"), np.arange(8) % 4
factor = Trace(donated=1.0)  # no guard sees it: it is an object of shardcore

costs = {"too much": False}  # read outside of the steps

RECORDED, DIFFERED, MATCHED = Event.RECORDED, Event.DIFFERED, Event.MATCHED
SKIPPED, RAN, CHANGED, REFUSED = Event.SKIPPED, Event.RAN, Event.CHANGED, Event.REFUSED
POSTPONED = Event.POSTPONED


class Steered(Spy):
    """Computes by an attribute, by a variable that no guard sees, and by a number in its input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.factor = 1.0

    def call(self, x):
        x = super().call(x) * self.factor
        if not is_real(x):
            return x
        x = x * factor.donated
        if keras.ops.max(x) > 10:
            generator = torch.Generator(x.device).manual_seed(1)  # a step that makes one is eager
            return x + torch.rand(x.shape, generator=generator, device=x.device)
        return x + 1 if keras.ops.max(x) > 0 else x


def change_attribute(model):
    model.layers[1].factor += 0.5


def take_too_long(model):
    """Lets no recording pay, until it is called again."""
    costs["too much"] = not costs["too much"]


def change_unguarded(model):
    factor.donated += 0.5


# What is done: steps with some rows times a number, and changes between them. What must happen.
ONE, ZERO, REFUSING = (8, 1.0), (8, 0.0), (8, 100.0)
FEW, FEW_ZEROS = (6, 1.0), (6, 0.0)
PROFILED, PROFILED_ZERO = (8, 1.0, cProfile.Profile), (8, 0.0, cProfile.Profile)
WALKS = {
    "runs": ([ONE, ONE, ONE, ONE], [RECORDED, MATCHED, RAN, RAN]),
    "a smaller batch, once": ([ONE, ONE, FEW], [RECORDED, MATCHED, SKIPPED]),
    "smaller batches": (
        [ONE, ONE, FEW, ONE, FEW, FEW],
        [RECORDED, MATCHED, SKIPPED, RAN, MATCHED, RAN],
    ),
    "smaller batches, another number": (
        [ONE, ONE, FEW, FEW_ZEROS, FEW_ZEROS, FEW_ZEROS],
        [RECORDED, MATCHED, SKIPPED, RECORDED, MATCHED, RAN],
    ),
    "under a profiler": (
        [PROFILED, ONE, PROFILED, ONE, PROFILED, PROFILED_ZERO, ONE],
        [SKIPPED, RECORDED, SKIPPED, MATCHED, RAN, SKIPPED, RAN],
    ),
    "changed once recorded": ([ONE, change_attribute, ONE], [RECORDED, CHANGED, RECORDED]),
    "changed once captured": (
        [ONE, ONE, change_attribute, ONE, ONE, ONE],
        [RECORDED, MATCHED, CHANGED, RECORDED, MATCHED, RAN],
    ),
    "recording takes too long": (
        [take_too_long, ONE, take_too_long, ONE, ONE, ONE],
        [POSTPONED, RECORDED, MATCHED, RAN],
    ),
    "two numbers in turns": (
        [ONE, ZERO, ONE, ZERO, ONE, ZERO],
        [RECORDED, RECORDED, MATCHED, MATCHED, RAN, RAN],
    ),
    "another number later": (
        [ONE, ONE, ZERO, ZERO, ZERO],
        [RECORDED, MATCHED, RECORDED, MATCHED, RAN],
    ),
    "differed once recorded": ([ONE, change_unguarded, ONE, ONE], [RECORDED, DIFFERED, MATCHED]),
    "differed once captured": (
        [ONE, ONE, ZERO, change_unguarded, ZERO, ZERO],
        [RECORDED, MATCHED, RECORDED, DIFFERED, MATCHED],
    ),
    "differed too often": (
        [ONE, *[change_unguarded, ONE] * 4],
        [RECORDED, DIFFERED, DIFFERED, REFUSED],
    ),
    "changed too often": (
        [ONE, *[change_attribute, ONE] * 10],
        [RECORDED, *[CHANGED, RECORDED] * 8, CHANGED, REFUSED],
    ),
    "refused at once": ([REFUSING, ONE], [REFUSED]),
    "refused once recorded": ([ONE, REFUSING, ONE], [RECORDED, REFUSED]),
    "refused once captured": ([ONE, ONE, REFUSING, ONE], [RECORDED, MATCHED, REFUSED]),
}


def walked(actions, jit_compile):
    """The events of the steps, with the states that they met and led to; the numbers of all."""
    factor.donated = 1.0
    x = keras.Input((4,))
    model = compiled(
        lambda: keras.Model(x, keras.layers.Dense(4)(Steered()(x))), jit_compile, "sgd"
    )
    trail, losses, note = [], [], CacheEntry.apply_event

    def noted(entry, event):
        before = entry.progress.state
        note(entry, event)
        trail.append((before, event, entry.progress.state, entry.signature.sizes))

    def pays(*_):
        return not costs["too much"]

    with (
        mock.patch.object(CacheEntry, "apply_event", noted),
        mock.patch.object(Payback, "is_worth", pays),
    ):
        for action in actions:
            if callable(action):
                action(model)
            else:
                rows, scale, *profiler = action
                x, y = X[:rows] * np.float32(scale), Y[:rows]
                with profiler[0]() if profiler else nullcontext():
                    losses.append(np.asarray(model.train_on_batch(x, y)))
    return trail, [*losses, *state(model)]


# Over two ranks these: with each event, but not in each state.
OVER_TWO = (
    "recording takes too long",
    "smaller batches, another number",
    "changed once captured",
    "differed once captured",
    "refused once captured",
)


@pytest.mark.parametrize(("shape", "walks"), [(None, tuple(WALKS)), ((1, 2), OVER_TWO)])
def test_steps_take_every_transition_and_no_other(shape, walks):
    def program(rank):
        begin(shape)
        return {
            name: [walked(WALKS[name][0], jit_compile) for jit_compile in (False, "auto")]
            for name in walks
        }

    every = {(*key, state) for key, state in TRANSITIONS.items()}
    for found in run_ranks(program, 1 if shape is None else 2, timeout=180):
        seen = set()
        for name, ((never, eager), (trail, captured)) in found.items():
            assert never == []
            assert (name, [event for _, event, *_ in trail]) == (name, WALKS[name][1])
            assert_equal(captured, eager)
            for size in {each[-1] for each in trail}:
                steps = [each[:-1] for each in trail if each[-1] == size]
                is_first = size == trail[0][-1]
                assert steps[0][0] is (State.NEW if is_first else State.DEFERRED)
                assert all(one[2] is other[0] for one, other in itertools.pairwise(steps))
                seen |= set(steps)
        assert seen <= every
        assert {event for _, event, _ in seen} == set(Event)
        assert walks == OVER_TWO or seen == every


def test_all_ranks_record_again_if_one_rank_must():
    """Its shards of a batch of another size may be computed by other operators."""

    def program(rank):
        begin((2, 1))
        make = TraceCapture.program

        def made(capture, earlier, trace, **how):
            if rank == 1 and isinstance(earlier, RecordedProgram):
                raise TracesDiffer("it has other operators")
            return make(capture, earlier, trace, **how)

        with mock.patch.object(TraceCapture, "program", made):
            trail, _ = walked([ONE, ONE, FEW, FEW, FEW, FEW], "auto")
        return [event for _, event, *_ in trail]

    assert run_ranks(program, 2) == [[RECORDED, MATCHED, SKIPPED, RECORDED, MATCHED, RAN]] * 2


def test_the_step_that_creates_deferred_sums_is_not_recorded():
    """No later step of a `fit` without callbacks that read its steps does the same."""

    def program(rank, shape):
        begin(shape)
        model = compiled(
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]), "auto"
        )
        events, note = [], CacheEntry.apply_event

        def noted(entry, event):
            events.append(event)
            note(entry, event)

        with mock.patch.object(CacheEntry, "apply_event", noted):
            model.fit(np.tile(X, (5, 1)), np.tile(Y, 5), batch_size=8, verbose=0)
        return events

    for shape in ((2, 1), (1, 2)):
        assert run_ranks(program, 2, shape) == [[RECORDED, MATCHED, RAN, RAN]] * 2


def test_while_one_rank_is_profiled_no_rank_records():
    def program(rank):
        begin((2, 1))
        first = PROFILED if rank == 1 else ONE
        trail, losses = walked([first, ONE, first, ONE, first], "auto")
        return [event for _, event, *_ in trail], losses

    (one, found), (other, same) = run_ranks(program, 2)
    assert one == other == [SKIPPED, RECORDED, SKIPPED, MATCHED, RAN]
    assert_equal(found, same)


def test_repeated_changes_on_one_rank_keep_all_ranks_eager():
    """Before the step is captured: after that it is an error of all ranks."""

    def program(rank):
        begin((2, 1))
        said = messages()
        change = change_attribute if rank == 1 else bool
        trail, losses = walked([ONE, *[change, ONE] * 10], "auto")
        return [event for _, event, *_ in trail if event is not CHANGED], losses, said

    (one, found, said), (other, same, _) = run_ranks(program, 2)
    assert one == other == [RECORDED] * 9 + [REFUSED]
    assert_equal(found, same)
    assert ["'factor' of Steered" in each for each in said] == [True]
