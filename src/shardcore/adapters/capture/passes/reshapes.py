"""Views as reshapes, for steps that Inductor compiles."""

from typing import Any

import attrs
import torch

from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.tape import Tape


def with_reshapes(tape: Tape) -> Tape:
    """`tape` with a reshape for each view of what nobody writes into.

    What Inductor makes of an operator may lie otherwise than the operator's result, so that there
    is no such view: in torch 2.13 a `stack` of one tensor lies as that tensor.
    """
    written = written_memories(tape)
    return tape.with_calls(
        attrs.evolve(call, operator=_RESHAPE)
        if call.operator is _VIEW and not tape.reads_of(call) & written
        else call
        for call in tape.calls
    )


_VIEW: Any = torch.ops.aten.view.default
_RESHAPE: Any = torch.ops.aten.reshape.default
