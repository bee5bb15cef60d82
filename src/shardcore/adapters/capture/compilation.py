"""A captured step, compiled by Inductor."""

from typing import Any

import attrs
import torch
from torch import fx

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.graph_program import GraphProgram
from shardcore.adapters.capture.tape import Tape


def compiled(program: GraphProgram, module: fx.GraphModule, tape: Tape) -> GraphProgram:
    """`program`, compiled; where that cannot be, itself with a remark that says why.

    Args:
        program: The step.
        module: Its graph.
        tape: What the graph was made of.
    """
    if any(form is None for form in tape.forms):
        why = "it draws from a generator with a seed (a Dropout with seed=, for instance)"
        return attrs.evolve(program, remark=why)
    forms = [tape.form(value) for value in tape.inputs]
    inputs = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in forms]
    try:
        run = torch_compat.inductor.compiled(module, [*inputs, *map(_detached, program.kept)])
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the graph is there
        return attrs.evolve(program, remark=f"{type(error).__name__}: {error}")

    def run_detached(*operands: Any) -> Any:
        return run(
            *(_detached(each).contiguous() for each in operands[: len(inputs)]),
            *map(_detached, operands[len(inputs) :]),
        )

    return attrs.evolve(program, run=run_detached)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without what autograd asks of a parameter, for which there would be a graph."""
    return tensor.detach()
