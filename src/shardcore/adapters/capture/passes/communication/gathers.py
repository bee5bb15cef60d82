"""All-gathers on a CPU that get their memory from the step."""

import attrs
import torch

from shardcore.adapters.capture.trace.rewriting import rewrite_calls
from shardcore.adapters.capture.trace.trace import Call, Trace
from shardcore.adapters.torch_private import collectives

_EMPTY = torch.ops.aten.empty.memory_format


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
