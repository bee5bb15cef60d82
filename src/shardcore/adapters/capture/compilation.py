"""A captured step, compiled by Inductor."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from types import FunctionType
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.analyses import needs_of, with_needs
from shardcore.adapters.capture.generated import function_of, graph_of
from shardcore.adapters.capture.passes import improved_for_compiler
from shardcore.adapters.capture.tape import Call, Tape, Value, values
from shardcore.domain.capture import NotCaptured

logger = logging.getLogger("shardcore.capture")


def compiled(
    tape: Tape,
    kept: Sequence[Any],
    literals: Mapping[int, torch.Tensor],
    onednn: torch_compat.OneDnn,
) -> Callable[..., Any]:
    """Returns the function of `tape`, compiled but for what Inductor cannot take.

    That runs first, as it was recorded. Raises whatever Inductor raises.

    Args:
        tape: A step.
        kept: The tensors and generators that the step reads and that were there before it.
        literals: By number, the constants among what is outside of the tape.
        onednn: Multiplies large matrices.
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
        second = torch_compat.inductor.compiled(module, [*inputs, *map(_detached, kept)])
    finally:
        logger.info("Inductor has ended after %.1f s", time.perf_counter() - began)
    count = len(tape.inputs)

    def run(*operands: Any) -> Any:
        made = first(*operands)
        ready = map(torch.Tensor.contiguous, map(_detached, (*operands[:count], *made)))
        return second(*ready, *map(_detached, operands[count:]))

    return run


# Without what autograd asks of a parameter, for which there would be a graph. It is no function
# of Python, which would be called for each variable.
_detached = torch.Tensor.detach


def parted(tape: Tape, literals: Set[int]) -> tuple[Tape, Tape]:
    """Returns `tape` in two: what no compiler takes, with all that it depends on, and the rest.

    No compiler takes functions of Python and random generators. A function makes a generator of its
    seed, or reads a number. Drawn numbers depend on shapes and seeds alone, as a rule, so little
    else is ahead.

    Args:
        tape: A step.
        literals: The numbers of the constants among what is outside.

    Returns:
        The first part, whose outputs are the last inputs of the second.

    Raises:
        NotCaptured: If both parts would write into views of one memory.
    """
    calls = enumerate(tape.calls)
    places = with_needs((n for n, call in calls if _is_for_python(tape, call)), needs_of(tape))
    ahead = tape.with_calls(call for n, call in enumerate(tape.calls) if n in places)
    rest = tape.with_calls(call for n, call in enumerate(tape.calls) if n not in places)
    made = {value for call in ahead.calls for value in call.results}
    used = {value for call in rest.calls for value in call.operands} | set(values(tape.outputs))
    known = {*tape.inputs, *(Value(n) for n in tape.outside if n not in literals)}
    given = sorted((made & used) - known, key=lambda value: value.number)
    if tape.memories(given) & tape.given():
        raise NotCaptured("a view of what is outside is made for a random draw, and read elsewhere")
    ahead.outputs, rest.inputs = tuple(given), [*tape.inputs, *given]
    return ahead, rest


def _is_for_python(tape: Tape, call: Call) -> bool:
    has_generator = any(tape.forms[each.number] is None for each in (*call.operands, *call.results))
    return has_generator or isinstance(call.operator, FunctionType)
