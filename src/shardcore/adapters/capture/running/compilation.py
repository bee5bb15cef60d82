"""Compiles a captured step with Inductor."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes import run_passes_for_compiler
from shardcore.adapters.capture.running.generated import graph_of
from shardcore.adapters.capture.trace.trace import Literals, Trace
from shardcore.adapters.failure import heartbeats
from shardcore.reporting.logs import log_of

logger = log_of("capture")

# The lines of collectives that an error names at most.
_MOST_LINES = 4


def compile_trace(
    trace: Trace, captured_inputs: Sequence[Any], literals: Literals, onednn: torch_private.OneDnn
) -> Callable[..., Any]:
    """Returns the compiled function of `trace`, the second part of a step.

    `captured_inputs` are the tensors from outside that the step reads. It raises whatever Inductor
    raises.
    """
    size = len(trace.calls)
    logger.info("Inductor compiles a step of %d operators, unless torch has it on disk", size)
    began = time.perf_counter()
    forms = [trace.form(value) for value in trace.inputs]
    inputs = [torch.empty(form.shape, dtype=form.dtype, device=form.device) for form in forms]
    module = graph_of(run_passes_for_compiler(trace, onednn), literals)
    try:
        generated = torch_private.inductor.compiled(
            module, [*inputs, *map(_detached, captured_inputs)]
        )
    finally:
        logger.info("Inductor has ended after %.1f s", time.perf_counter() - began)
    count, started = len(trace.inputs), _collectives(trace)

    def run(*operands: Any) -> Any:
        ready = map(torch.Tensor.contiguous, map(_detached, operands[:count]))
        try:
            return generated(*ready, *map(_detached, operands[count:]))
        except RuntimeError as error:
            late = heartbeats.timed_out(error, f"a collective of a compiled step ({started})")
            if late is None:
                raise
            raise late from error

    return run


def _collectives(trace: Trace) -> str:
    """Returns the names and recorded lines of the collectives of `trace`, of which one has failed.

    Inductor may reorder them, so it is not known which of them an error is of.
    """
    texts = [f"{call.collective}, {call.line}" for call in trace.calls if call.collective]
    lines = list(dict.fromkeys(texts))
    more = f"; or one of {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return "; or ".join(lines[:_MOST_LINES]) + more


# A parameter would need a graph for autograd. No Python function runs for each variable.
_detached = torch.Tensor.detach
