"""A captured step, compiled by Inductor."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.generated import function_of, graph_of
from shardcore.adapters.capture.parting import parted
from shardcore.adapters.capture.passes import improved_for_compiler
from shardcore.adapters.capture.passes.inductor import with_factors_apart
from shardcore.adapters.capture.passes.products import with_onednn_products
from shardcore.adapters.capture.recorded_program import RecordedProgram
from shardcore.adapters.capture.tape import Tape

logger = logging.getLogger("shardcore.capture")


def compiled(
    program: RecordedProgram,
    tape: Tape,
    literals: Mapping[int, torch.Tensor],
    onednn: torch_compat.OneDnn,
) -> RecordedProgram:
    """`program`, compiled; where that cannot be, itself with a remark that says why.

    Args:
        program: The step.
        tape: What it was made of.
        literals: By number, the constants among what is outside of the tape.
        onednn: Multiplies large matrices.
    """
    count = len(tape.calls)
    logger.info("Inductor compiles a step of %d operators, unless torch has it on disk", count)
    began = time.perf_counter()
    try:
        made = attrs.evolve(program, run=_run(program, tape, literals, onednn))
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the graph is there
        made = attrs.evolve(program, remark=f"{type(error).__name__}: {error}")
    logger.info("Inductor has ended after %.1f s", time.perf_counter() - began)
    return made


def _run(
    program: RecordedProgram,
    tape: Tape,
    literals: Mapping[int, torch.Tensor],
    onednn: torch_compat.OneDnn,
) -> Callable[..., Any]:
    """Runs what Inductor cannot take as it was recorded, and then the rest, compiled."""
    ahead, rest = parted(with_factors_apart(tape), set(literals))
    first = function_of(ahead, literals)
    forms = [rest.form(value) for value in rest.inputs]
    inputs = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in forms]
    module = graph_of(improved_for_compiler(with_onednn_products(rest, onednn)), literals)
    second = torch_compat.inductor.compiled(module, [*inputs, *map(_detached, program.kept)])
    count = len(tape.inputs)

    def run(*operands: Any) -> Any:
        made = first(*operands)
        ready = map(torch.Tensor.contiguous, map(_detached, (*operands[:count], *made)))
        return second(*ready, *map(_detached, operands[count:]))

    return run


# Without what autograd asks of a parameter, for which there would be a graph. It is no function
# of Python, which would be called for each variable.
_detached = torch.Tensor.detach
