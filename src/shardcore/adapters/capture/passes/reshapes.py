"""Views as reshapes, for steps that Inductor compiles."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.tape import Tape


def with_reshapes(tape: Tape) -> Tape:
    """`tape` with a reshape for each view of what nobody writes into.

    What Inductor makes of an operator may lie otherwise than the operator's result, so that there
    is no such view: in torch 2.13 a `stack` of one tensor lies as that tensor. What a collective
    gives stays viewed: a reshape that copies would copy it before it is there.
    """
    written = written_memories(tape) | _waited_for(tape)
    return tape.with_calls(
        attrs.evolve(call, operator=_RESHAPE)
        if call.operator is _VIEW and not tape.reads_of(call) & written
        else call
        for call in tape.calls
    )


def _waited_for(tape: Tape) -> set[int]:
    waits = (call for call in tape.calls if torch_compat.is_wait(call.operator))
    return {memory for call in waits for memory in tape.reads_of(call)}


_VIEW: Any = torch.ops.aten.view.default
_RESHAPE: Any = torch.ops.aten.reshape.default
