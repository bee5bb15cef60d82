"""Pointwise operators on large tensors, one after the other, run a block at a time."""

from collections import Counter

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.blocks import BlockSize, Cut, blockwise
from shardcore.adapters.capture.exact import is_exact
from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes.told import with_results_told
from shardcore.adapters.capture.tape import Call, Tape, Value, values

# The elements of a block. Measured on a CPU with 1 MiB of second-level cache a core, over Adam's
# update of a million parameters: 32,768 take 3.2 ms, this many 2.5 ms, twice as many 2.0 ms, which
# would be worse where ranks share less cache of the third level than here; whole tensors 9 ms.
BLOCK = 131072
# 64 bytes hold 64 elements at most, and torch 2.13 takes two vectors at once. Threads share
# a tensor evenly, wherever the part of each ends.
SIZE = BlockSize(BLOCK, lanes=128)


def in_blocks(tape: Tape, size: BlockSize = SIZE) -> Tape:
    """Pointwise calls of one shape that hang together are one call, which goes block by block.

    Each element is computed as before. But a block is still in the cache when the next operator
    wants it, and what the chain alone reads is never there as a whole. On a CPU only; where torch
    has several threads, only what has the same bits wherever they begin.

    Args:
        tape: A step.
        size: That of a block. Smaller tensors are left alone.
    """
    used = Counter(value for call in tape.calls for value in set(call.operands))
    used.update(set(values(tape.outputs)))
    calls: list[Call] = []
    open_chains: list[_Chain] = []
    for call in tape.calls:
        before = [each for each in open_chains if each.is_before(call, tape)]
        open_chains = [each for each in open_chains if each not in before]
        chain, ended = _joined(call, before, tape, size)
        calls += [one for each in ended for one in each.done(tape, size, used)]
        if chain is None:
            calls.append(call)
        else:
            open_chains.append(chain)
    calls += [one for each in open_chains for one in each.done(tape, size, used)]
    return tape.with_calls(calls)


@attrs.frozen(eq=False)
class _Chain:
    """Pointwise calls whose results have one shape; no other open chain hangs on them."""

    shape: tuple[int, ...]
    calls: tuple[Call, ...]

    def is_before(self, call: Call, tape: Tape) -> bool:
        """Whether `call` reads or writes what these calls write, or writes what they read."""
        reads, writes = tape.reads_of(call), tape.writes_of(call)
        return any(
            (reads | writes) & tape.writes_of(each) or writes & tape.reads_of(each)
            for each in self.calls
        )

    def cut(self, tape: Tape, size: BlockSize) -> Cut | None:
        """How all of them can go block by block; None if they cannot."""
        involved = {v for each in self.calls for v in (*each.operands, *each.results)}
        written = {memory for each in self.calls for memory in tape.writes_of(each)}
        # Of what is written there must be no other view, whose blocks would be other elements.
        views = Counter(tape.memory[value.number] for value in involved)
        if any(views[memory] > 1 for memory in written):
            return None
        rounded = [
            value for each in self.calls if not is_exact(each, tape) for value in each.results
        ]
        return Cut.of(self.shape, map(tape.form, involved), map(tape.form, rounded), size)

    def done(self, tape: Tape, size: BlockSize, used: Counter[Value]) -> tuple[Call, ...]:
        """These calls as one.

        Args:
            tape: The step.
            size: That of a block.
            used: How many calls of the step read each value.
        """
        cut = self.cut(tape, size)
        if len(self.calls) == 1 or cut is None:
            return self.calls
        inputs, made = self._ends()
        read = Counter(value for each in self.calls for value in set(each.operands))
        results = [value for value in made if used[value] > read[value]]
        part = attrs.evolve(
            tape, calls=list(self.calls), inputs=inputs, outside={}, outputs=tuple(results)
        )
        body = function_of(with_results_told(part), {})
        run = blockwise(body, cut, [tape.form(v) for v in inputs], [tape.form(v) for v in results])
        writes = {value for each in self.calls for value in each.writes if value in inputs}
        line = self.calls[0].line
        return (Call(run, tuple(inputs), {}, results, tuple(writes), line),)

    def _ends(self) -> tuple[list[Value], list[Value]]:
        """What these calls read that was there before, and what they make."""
        inputs: dict[Value, None] = {}
        made: dict[Value, None] = {}
        for call in self.calls:
            inputs.update((value, None) for value in call.operands if value not in made)
            made.update((value, None) for value in call.results if value not in inputs)
        return list(inputs), list(made)


def _joined(
    call: Call, before: list[_Chain], tape: Tape, size: BlockSize
) -> tuple[_Chain | None, list[_Chain]]:
    """The chain that `call` ends, None if it is in none; and the chains that are through.

    Args:
        call: The next call.
        before: The open chains that it hangs on.
        tape: The step.
        size: That of a block.
    """
    if not _is_pointwise(call, tape):
        return None, before
    form = tape.form(call.result)
    if form.elements < size.elements:
        return None, before
    mates = [each for each in before if each.shape == form.shape]
    chain = _Chain(form.shape, (*(one for each in mates for one in each.calls), call))
    if chain.cut(tape, size) is None:
        return _Chain(form.shape, (call,)), before
    return chain, [each for each in before if each not in mates]


def _is_pointwise(call: Call, tape: Tape) -> bool:
    """Whether each element of the one result hangs on one element of each operand, on a CPU."""
    return (
        torch.Tag.pointwise in getattr(call.operator, "tags", ())
        and not torch_compat.draws(call.operator)
        and isinstance(call.result, Value)
        and all(tape.forms[each.number] is not None for each in call.operands)
        and tape.form(call.result).device.type == "cpu"
        and not any(isinstance(each, list | tuple) for each in call.args)
        and (torch.get_num_threads() == 1 or is_exact(call, tape))
    )
