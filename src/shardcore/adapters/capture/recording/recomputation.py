"""Recomputed layers: their forward pass runs again in the backward pass, and draws the same."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from shardcore.adapters.capture.recording.functions import generator_states, set_generator_states
from shardcore.adapters.capture.recording.recorder import Recorder

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def contexts(recorder: Recorder) -> Contexts:
    """Returns the contexts of a forward pass that begins now, and of its recomputations.

    `torch.utils.checkpoint` saves and restores the random state where no recorder sees it, so these
    contexts record that.
    """
    return nullcontext(), _Recomputation(recorder, recorder.as_one_call(generator_states, (), {}))


@attrs.define(eq=False)
class _Recomputation(AbstractContextManager[None]):
    """Sets torch's generators to the states `begin`; at the end, to those before."""

    recorder: Recorder
    begin: Any
    _before: Any = attrs.field(default=None, init=False)

    def __enter__(self) -> None:
        self._before = self.recorder.as_one_call(generator_states, (), {})
        self.recorder.as_one_call(set_generator_states, (self.begin,), {})

    def __exit__(self, *error: object) -> None:
        self.recorder.as_one_call(set_generator_states, (self._before,), {})
