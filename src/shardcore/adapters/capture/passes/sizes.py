"""Sizes that hang on values, for steps that Inductor compiles."""

from typing import Any

import attrs
import torch

from shardcore.adapters.capture.tape import Tape


def with_sizes(tape: Tape) -> Tape:
    """What is repeated is told how long it gets, as Inductor cannot know: as in the recording.

    `keras.ops.repeat` counts so, and with it metrics like `AUC`. The counts hang on nothing that
    changes: else the step is not captured.
    """
    return tape.with_calls(
        attrs.evolve(call, kwargs=call.kwargs | {"output_size": tape.form(call.result).shape[0]})
        if call.operator is _REPEAT
        else call
        for call in tape.calls
    )


_REPEAT: Any = torch.ops.aten.repeat_interleave.Tensor
