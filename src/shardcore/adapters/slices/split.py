"""An operator run on the slices of each rank, as a rule of the domain says."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardcore.adapters import fallback
from shardcore.adapters.slices.copies import note_view
from shardcore.adapters.slices.tensor import (
    Slice,
    gathered,
    in_layout,
    replicated,
    without_pending,
)
from shardcore.adapters.split_operators import Parts, Shapes
from shardcore.adapters.torch_compat import is_view
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.operator_rules import OperatorRule
from shardcore.domain.operator_rules_choice import Placed, Split, split
from shardcore.domain.placements import Placement
from shardcore.ports.world import World


def run_split(
    operator: Any,
    rule: OperatorRule,
    operands: Sequence[torch.Tensor],
    call: Callable[[Parts], Sequence[torch.Tensor | None]],
    result_shapes: Shapes = (),
) -> tuple[Slice | None, ...]:
    """`split_operators.RunSplit` for slices."""
    world = next(each.world for each in operands if isinstance(each, Slice))
    tensors = _weights_brought([as_slice(each, world) for each in operands])
    chosen = _chosen(operator, rule, tensors, result_shapes)
    pairs = zip(tensors, chosen.operands, strict=True)
    parts = call([_in_placements(tensor, placements).part for tensor, placements in pairs])
    return tuple(
        None if each is None else Slice(*_placed_result(rule, chosen, number, each, world), world)
        for number, each in enumerate(parts)
    )


def run_linear(
    operator: Any,
    rule: OperatorRule,
    operand: Slice,
    call: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> tuple[Slice, ...]:
    """Split an operator that is linear in its one operand: what is pending stays so.

    What is made of a variable's value alone counts as that. A view shares the memory of its
    operand, or is noted as a copy; so is that of a pending sum, which is not itself when the sum is
    done.
    """
    tensor, pending = _set_aside(operand)
    chosen = _chosen(operator, rule, [tensor], ())
    moved = _in_placements(tensor, chosen.operands[0])
    parts = call(moved.part)
    strides: Sequence[Any] = [None] * len(parts)
    if _shares_memory(operator, operand):
        whole = torch.empty_strided(operand.shape, operand.stride(), device="meta")
        strides = [each.stride() for each in call(whole)]
    results = []
    for number, (each, its) in enumerate(zip(parts, strides, strict=True)):
        part, layout, shape = _placed_result(rule, chosen, number, each, operand.world)
        layout = Layout(layout.mesh, layout.spec, (*layout.partial, *pending))
        memory = operand.memory if is_view(operator) else None
        result = Slice(part, layout, shape, operand.world, operand.kept, its, memory)
        if is_view(operator):
            own_memory = its is None or moved is not tensor or bool(pending)
            note_view(result, operand, partial(_one_of, call, number), is_copy=own_memory)
        results.append(result)
    return tuple(results)


def _one_of(
    call: Callable[[torch.Tensor], Sequence[torch.Tensor]], number: int, tensor: torch.Tensor
) -> torch.Tensor:
    return call(tensor)[number]


def _set_aside(tensor: Slice) -> tuple[Slice, PartialAxes]:
    """`tensor` as if no sum were pending, and the sums that are."""
    partial = tensor.mesh_layout.partial
    if not partial or not {op for _, op in partial} <= {"sum", "avg"}:
        return tensor, ()
    layout, shape = without_pending(tensor.mesh_layout), tuple(tensor.shape)
    return Slice(tensor.part, layout, shape, tensor.world, strides=tensor.stride()), partial


def _shares_memory(operator: Any, operand: Slice) -> bool:
    """Whether the parts of the results share the memory of the operand's part."""
    return is_view(operator) and (operator not in _RESHAPES or operand.is_contiguous())


# They copy what has gaps, or another order, in memory.
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten.reshape.default}


def _placed_result(
    rule: OperatorRule, chosen: Split, number: int, part: torch.Tensor, world: World
) -> tuple[torch.Tensor, Layout, tuple[int, ...]]:
    """A part of result `number`, the layout of the result, and its global shape."""
    mesh, at = world.mesh.shape, world.mesh.coordinate(world.position)
    return (
        part,
        Layout.from_placements(world.mesh, chosen.results[number], part.ndim),
        chosen.global_shape(rule.results[number], tuple(part.shape), mesh, at),
    )


def as_slice(tensor: torch.Tensor, world: World) -> Slice:
    """`tensor`, a plain one as a slice that is whole."""
    return tensor if isinstance(tensor, Slice) else replicated(tensor, world)


def _weights_brought(tensors: list[Slice]) -> list[Slice]:
    """What variables keep, whole where another tensor takes part: it is gathered for this use."""
    if all(tensor.kept or tensor.ndim == 0 for tensor in tensors):
        return tensors
    return [gathered(each) if each.kept else each for each in tensors]


def _chosen(
    operator: Any, rule: OperatorRule, tensors: Sequence[Slice], result_shapes: Shapes
) -> Split:
    chosen = split(rule, tensors[0].world.mesh.shape, tuple(map(_placed, tensors)), result_shapes)
    if chosen.gathers:
        fallback.tell(operator, tensors)
    return chosen


def _placed(tensor: Slice) -> Placed:
    return Placed(tuple(tensor.shape), tensor.placements, tensor.element_size())


def _in_placements(tensor: Slice, placements: Sequence[Placement]) -> Slice:
    """`tensor` in `placements`, and where several axes split a dim, in the order of the mesh."""
    sizes = zip(tensor.world.mesh.shape, tensor.placements, placements, strict=True)
    # Along an axis of one rank nothing lies otherwise, whatever is said.
    wanted = [have if size == 1 else want for size, have, want in sizes]
    return in_layout(tensor, Layout.from_placements(tensor.world.mesh, wanted, tensor.ndim))
