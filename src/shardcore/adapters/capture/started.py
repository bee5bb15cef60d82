"""The collectives that a step starts, as the ranks compare them."""

from collections.abc import Iterator

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Tape, values
from shardcore.ports.capture import StartedCollective


def started(tape: Tape) -> Iterator[StartedCollective]:
    """The collectives of `tape`, in order."""
    for call in tape.calls:
        if torch_compat.is_collective(call.operator):
            *operands, group = call.args  # the group's name is another one on other ranks
            plain = [each for each in operands if isinstance(each, str | int)]
            # An all-to-all has a list of sizes: ranks may send more or less.
            may_differ = any(isinstance(each, list) and not list(values(each)) for each in operands)
            tensors = list(call.operands)
            elements = 0 if may_differ else sum(tape.form(each).elements for each in tensors)
            # Whether it writes where its operand was is a rank's own affair.
            name = torch_compat.collective_name(call.operator)
            yield StartedCollective(f"{name} of {len(tensors)}, {plain}", str(group), elements)
