"""Compiles a captured step with Inductor."""

import logging
import time
from collections.abc import Callable, Sequence, Set
from types import FunctionType
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import needs_of, with_needs
from shardcore.adapters.capture.generated import function_of, graph_of
from shardcore.adapters.capture.passes import improved_for_compiler
from shardcore.adapters.capture.tape import Call, Literals, Tape, numbered, values
from shardcore.adapters.failure import heartbeats
from shardcore.domain.steps.capture import NotCaptured

logger = logging.getLogger("shardcore.capture")

# The lines of collectives that an error names at most.
_MOST_LINES = 4


def compiled(
    tape: Tape, kept: Sequence[Any], literals: Literals, onednn: torch_private.OneDnn
) -> Callable[..., Any]:
    """Returns the function of `tape`, compiled except for calls that Inductor cannot take.

    Those run first, as recorded. `kept` are the tensors and generators from outside that the step
    reads. It raises whatever Inductor raises.
    """
    size = len(tape.calls)
    logger.info("Inductor compiles a step of %d operators, unless torch has it on disk", size)
    began = time.perf_counter()
    ahead, rest = parted(tape, set(literals))
    first = function_of(ahead, literals)
    forms = [rest.form(value) for value in rest.inputs]
    inputs = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in forms]
    module = graph_of(improved_for_compiler(rest, onednn), literals)
    try:
        second = torch_private.inductor.compiled(module, [*inputs, *map(_detached, kept)])
    finally:
        logger.info("Inductor has ended after %.1f s", time.perf_counter() - began)
    count, started = len(tape.inputs), _collectives(rest)

    def run(*operands: Any) -> Any:
        made = first(*operands)
        ready = map(torch.Tensor.contiguous, map(_detached, (*operands[:count], *made)))
        try:
            return second(*ready, *map(_detached, operands[count:]))
        except RuntimeError as error:
            late = heartbeats.timed_out(error, f"a collective of a compiled step ({started})")
            if late is None:
                raise
            raise late from error

    return run


def _collectives(tape: Tape) -> str:
    """Returns the names and recorded lines of the collectives of `tape`, of which one has failed.

    Inductor may reorder them, so it is not known which of them an error is of.
    """
    found = [f"{each.collective}, {each.line}" for each in tape.calls if each.collective]
    lines = list(dict.fromkeys(found))
    more = f"; or one of {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return "; or ".join(lines[:_MOST_LINES]) + more


# A parameter would need a graph for autograd. No Python function runs for each variable.
_detached = torch.Tensor.detach


def parted(tape: Tape, literals: Set[int]) -> tuple[Tape, Tape]:
    """Returns `tape` in two: the calls that no compiler takes, with their dependencies; the rest.

    No compiler takes Python functions and random generators. Draws depend on shapes and seeds, as a
    rule, so the first part is small. Its outputs are the last inputs of the second part.

    Raises:
        NotCaptured: If both parts would write into views of one memory.
    """
    calls = enumerate(tape.calls)
    places = with_needs((n for n, call in calls if _is_for_python(tape, call)), needs_of(tape))
    ahead = tape.with_calls(call for n, call in enumerate(tape.calls) if n in places)
    rest = tape.with_calls(call for n, call in enumerate(tape.calls) if n not in places)
    made = {value for call in ahead.calls for value in call.results}
    used = {value for call in rest.calls for value in call.operands} | set(values(tape.outputs))
    known = {*tape.inputs, *(numbered(n) for n in tape.outside if n not in literals)}
    given = sorted((made & used) - known, key=lambda value: value.number)
    if tape.memories(given) & tape.given():
        raise NotCaptured("a random draw and another call read one view of a tensor from outside")
    ahead.outputs, rest.inputs = tuple(given), [*tape.inputs, *given]
    return ahead, rest


def _is_for_python(tape: Tape, call: Call) -> bool:
    has_generator = any(tape.forms[each.number] is None for each in (*call.operands, *call.results))
    return has_generator or isinstance(call.operator, FunctionType)
