"""Warnings about the fall-back, which runs an operator on full operands on every rank (ADR 6)."""

from typing import Any

from shardcore.adapters import torch_private
from shardcore.ports.measurement import layer_scope
from shardcore.reporting.logs import log_of

logger = log_of("operators")

# Operands of at most so many bytes cost nothing worth a warning.
_SMALL = 1024


def warn_fallback(operator: object, args: object) -> None:
    """Counts a call in the engine of its sharded operands, and warns at the first large one."""
    operands = sharded(args)
    engine, size = operands[0].engine, sum(operand.nbytes for operand in operands)
    engine.fallbacks[str(operator)] += 1
    if size <= _SMALL or str(operator) in engine.warned:
        return
    engine.warned.add(str(operator))
    shapes = ", ".join(
        f"{tuple(operand.shape)} as [{', '.join(map(str, operand.mesh_layout.placements))}]"
        for operand in operands
    )
    logger.warning(
        "Operator %s%s cannot be sharded for %s: its operands are replicated first (%d bytes). "
        "The result is right; each rank does all of the work of this operator.",
        operator,
        f" in layer {layer!r}" if (layer := layer_scope.now()) else "",
        shapes,
        size,
    )


def count(args: object) -> int:
    """Counts the calls so far in the engine of sharded operands; 0 if none is sharded."""
    return next((tensor.engine.fallbacks.total() for tensor in sharded(args)), 0)


def sharded(args: object) -> list[Any]:
    """Lists the sharded tensors in any nest of operands."""
    return [leaf for leaf in torch_private.tree_leaves(args) if hasattr(leaf, "mesh_layout")]
