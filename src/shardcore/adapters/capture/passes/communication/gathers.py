"""All-gathers: of weights again in the backward pass, and into memory that the step makes."""

from bisect import bisect

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace.analyses import gathers, makers_of, with_needs
from shardcore.adapters.capture.trace.rewriting import rename_values, repeat_calls, rewrite_calls
from shardcore.adapters.capture.trace.trace import Call, Trace, Value
from shardcore.adapters.torch_private import collectives

_EMPTY = torch.ops.aten.empty.memory_format


def with_regathers(trace: Trace) -> Trace:
    """Returns `trace` with a second all-gather of each weight that the backward pass reads.

    The full weight is freed in between, as FSDP's `reshard_after_forward` does. A weight that the
    backward pass reads before another all-gather is kept.
    """
    new_trace = trace.with_calls([])
    makers = makers_of(trace)
    needs = [{makers[value] for value in call.operands if value in makers} for call in trace.calls]
    indices = [index for index, call in enumerate(trace.calls) if gathers(call)]
    calls = list(trace.calls)
    again: dict[int, list[Call]] = {}
    for index in indices:
        if calls[index].backward:
            continue
        made, last_use, readers = _uses(index, trace)
        if not readers or bisect(indices, last_use) == bisect(indices, readers[0]):
            continue  # no other weight is all-gathered between the two
        read = {value for reader in readers for value in trace.calls[reader].operands} & made
        made_by = with_needs({makers[value] for value in read}, needs)
        if _may_repeat(made_by, readers[0], trace):
            names: dict[Value, Value] = {}
            for call in repeat_calls((trace.calls[maker] for maker in made_by), names, new_trace):
                again.setdefault(readers[0], []).append(attrs.evolve(call, backward=True))
            for reader in readers:
                args, kwargs = rename_values((calls[reader].args, calls[reader].kwargs), names)
                calls[reader] = attrs.evolve(calls[reader], args=args, kwargs=kwargs)
    new_trace.calls = [
        scheduled for index, call in enumerate(calls) for scheduled in (*again.get(index, ()), call)
    ]
    return new_trace


def _uses(gather: int, trace: Trace) -> tuple[set[Value], int, list[int]]:
    """Returns the uses of the weight that the call at index `gather` all-gathers.

    Returns:
        The weight and its copies and views; the index of the last call that reads it before the
        backward pass; and the indices of its readers in that pass.
    """
    made = set(trace.calls[gather].results)
    readers, last_use = [], gather
    for index in range(gather + 1, len(trace.calls)):
        call = trace.calls[index]
        if made.isdisjoint(call.operands):
            continue
        if call.backward:
            readers.append(index)
        elif made.issuperset(call.operands) and _moves(call):
            made |= set(call.results)
        else:
            last_use = index
    return made, last_use, readers


def _may_repeat(indices: list[int], reader: int, trace: Trace) -> bool:
    """Returns whether these calls only move data that nothing changes before index `reader`."""
    calls = [trace.calls[index] for index in indices]
    touched = set[int]().union(*map(trace.reads_of, calls), *map(trace.writes_of, calls))
    between = trace.calls[indices[0] : reader]
    written = (value for call in between for value in call.writes)
    moves = all(_moves(call) or gathers(call) for call in calls)
    return moves and not touched & trace.memories((*written, *trace.inputs))


def _moves(call: Call) -> bool:
    """Returns whether the results are copies or views of the operands."""
    operator = call.operator
    return operator in _MOVES or getattr(operator, "is_view", False)


_MOVES = {
    torch_private.TO_COPY,
    torch.ops.aten.cat.default,
    torch.ops.aten.chunk.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.pad.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
}


def with_memory_for_gathers(trace: Trace) -> Trace:
    """Returns `trace` with all-gathers on a CPU that write into memory which the step makes.

    Such a gather is safe on gloo where several are under way (`collectives.gather_safely`), and
    here it runs no Python.
    """

    def rewrite(call: Call, new_trace: Trace) -> Call:
        if call.operator is not collectives.gather():
            return call
        form = new_trace.form(call.result)
        if form.device.type != "cpu" or form.dtype.is_complex:
            return call
        kwargs = {"dtype": form.dtype, "device": form.device}
        new_trace.calls.append(Call(_EMPTY, ([*form.shape],), kwargs, call.result, (), call.line))
        into = call.kwargs | {"out": call.result}
        operator = collectives.gather_into()
        return attrs.evolve(call, operator=operator, kwargs=into, writes=(call.result,))

    return rewrite_calls(trace, rewrite)
