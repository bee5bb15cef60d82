"""Calls of a step for one slice of their rows, by the rules by which the engine shards them.

The calls run, without values, on sharded tensors over a mesh with a rank for each slice. What the
rules do not prove is not sliced: a call for which the engine would redistribute an operand, run on
full tensors, or compute something else on another rank.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.passes.slices import Seed
from shardcore.adapters.capture.passes.unrolled import Region, SlicedCalls
from shardcore.adapters.capture.recording.comparison import difference
from shardcore.adapters.capture.recording.values import RecordedValues
from shardcore.adapters.capture.trace import Call, Trace, Value
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.local_shards import LocalShards
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import Args, Kwargs
from shardcore.domain.errors import ControlFlow
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Shard, blocks_of
from shardcore.ports.measurement import redistribution_scope
from shardcore.ports.world import World

AXIS = "slice"

# Operators that fill a tensor, with the position of its shape among their operands. The shape is
# that of the full tensor: a slice fills fewer rows, if the calls that read it are sliced.
_FILLS = {
    torch.ops.aten.zeros.default: 0,
    torch.ops.aten.ones.default: 0,
    torch.ops.aten.full.default: 0,
    torch.ops.aten.new_zeros.default: 1,
    torch.ops.aten.new_ones.default: 1,
    torch.ops.aten.new_full.default: 1,
}


def slice_calls(region: Region, trace: Trace, seed: Seed, slices: int) -> SlicedCalls | None:
    """Finds the calls for one slice; see `passes.slices.SliceCalls`."""
    mesh = Mesh((slices,), (AXIS,))
    value, dim, count = seed
    layouts = {value: _sharded(trace.form(value).shape, dim, count, mesh)}
    while True:
        runs = [_SliceRun(region, trace, layouts, mesh, at) for at in (0, -1)]
        try:
            first, last = [run.run() for run in runs]
        except _Redistributed as asked:
            operand = runs[0].open.get(id(asked.part))
            is_sliced = isinstance(asked.layout.placement(AXIS), Shard)
            if operand is None or operand in layouts or not is_sliced:
                return None
            layouts[operand] = asked.layout
        except Exception:  # noqa: BLE001 - it is not proven, whatever an operator raises: all rows
            return None
        else:
            # An operator that asks for its rank, as for the numbers of its rows, has other calls.
            return None if difference(first.trace, last.trace) else first


def _sharded(shape: Sequence[int], dim: int, count: int, mesh: Mesh) -> Layout:
    dims = range(len(shape))
    spec = tuple(AXIS if at == dim else None for at in dims)
    blocks = tuple(blocks_of(count, 1) if at == dim else 1 for at in dims)
    return Layout(mesh, spec, blocks=blocks)


@attrs.frozen(eq=False)
class _Redistributed(ControlFlow):
    """The engine would redistribute an operand.

    Args:
        part: Its local shard.
        layout: The layout that it would get.
    """

    part: object
    layout: Layout


class _NotSliced(ControlFlow):
    """A region cannot be sliced."""


class _NoGroups(Mapping[str, "dist.ProcessGroup"]):
    """Slices have no process group: they cannot send anything to each other."""

    def __getitem__(self, axis: str) -> NoReturn:
        raise _NotSliced(f"no collective over axis {axis!r}")

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


@attrs.define(eq=False)
class _SliceRun:
    """Runs a region on the shards of one slice, without values, and records its calls.

    Args:
        region: The calls.
        trace: The step.
        layouts: The layouts of the inputs, and of tensors that it fills, which are sliced.
        mesh: The mesh with a rank for each slice.
        position: The slice.
    """

    region: Region
    trace: Trace
    layouts: Mapping[Value, Layout]
    mesh: Mesh
    position: int
    # By the id of the local shard, the values that may have another layout.
    open: dict[int, Value] = attrs.field(factory=dict, init=False)
    _recorded: Trace = attrs.field(factory=Trace, init=False)
    _values: RecordedValues = attrs.field(init=False)
    _call: Call = attrs.field(init=False)  # of the region, that runs

    def __attrs_post_init__(self) -> None:
        self._values = RecordedValues(self._recorded, self._refuse, nullcontext)

    def _refuse(self, why: str, _remedy: str) -> NoReturn:
        raise AssertionError(why)

    def run(self) -> SlicedCalls:
        """Runs it.

        Raises:
            _Redistributed: If the engine would redistribute an operand.
        """
        slices = tuple(range(self.mesh.size))
        device = self.trace.form(self.region.inputs[0]).device
        world = World(self.mesh, slices, slices[self.position], device.type)
        engine = Engine(world, _NoGroups(), LocalShards())
        listener = torch_private.OperatorListener(self._begin, self._end, values=False)
        with torch.no_grad(), torch_private.WithoutValues():
            tensors = {value: self._input(value, engine) for value in self.region.inputs}
            self._recorded.inputs = [
                self._values.from_outside(tensor.part) for tensor in tensors.values()
            ]
            self.open = {id(tensor.part): value for value, tensor in tensors.items()}
            inputs = [tensor.form.layout.placement(AXIS) for tensor in tensors.values()]
            with listener:
                for call in self.region.calls:
                    self._run_call(call, tensors, engine)
            outputs = [tensors[value] for value in self.region.outputs]
            self._recorded.outputs = [self._values.value(tensor.part) for tensor in outputs]
        assert not self._recorded.outside, "a call makes a tensor of values"
        return SlicedCalls(
            # For the strides of a view the engine makes a full tensor without memory.
            without_dead_code(self._recorded),
            inputs,
            [tensor.form.layout.placement(AXIS) for tensor in outputs],
        )

    def _input(self, value: Value, engine: Engine) -> ShardedTensor:
        form, layout = self.trace.form(value), self.layouts.get(value)
        if layout is not None:
            shape = layout.local_shape(form.shape, engine.world.position)
            part = torch.empty(shape, dtype=form.dtype, device=form.device)
            return engine.sharded(part, layout, form.shape)
        part = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device)
        return engine.replicated(part)

    def _run_call(self, call: Call, tensors: dict[Value, Any], engine: Engine) -> None:
        self._call = call
        if call.operator in _FILLS:
            tensors[call.result] = self._filled(call, tensors, engine)
            return

        def operand(leaf: Any) -> Any:
            return tensors[leaf] if isinstance(leaf, Value) else leaf

        args, kwargs = torch_private.tree_map(operand, (call.args, call.kwargs))
        results = torch_private.tree_leaves(call.operator(*args, **kwargs))
        made = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        for value, tensor in zip(call.results, made, strict=True):
            form = self.trace.form(value)
            assert (tuple(tensor.shape), tensor.dtype) == (form.shape, form.dtype)
            # What the engine leaves plain is equal on all ranks.
            tensors[value] = engine.as_sharded(tensor)

    def _filled(self, call: Call, tensors: Mapping[Value, Any], engine: Engine) -> ShardedTensor:
        args = [tensors[arg].part if isinstance(arg, Value) else arg for arg in call.args]
        form, at = self.trace.form(call.result), _FILLS[call.operator]
        layout = self.layouts.get(call.result, Layout.replicated(self.mesh, len(form.shape)))
        args[at] = list(layout.local_shape(form.shape, engine.world.position))
        tensor = engine.sharded(call.operator(*args, **call.kwargs), layout, form.shape)
        self.open[id(tensor.part)] = call.result
        return tensor

    def _begin(self, _operator: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        if move := redistribution_scope.now():
            raise _Redistributed(move.part, move.target)
        return self._values.operands(args, kwargs)

    def _end(self, operator: Any, args: Args, kwargs: Kwargs, references: Any, result: Any) -> None:
        operands, named = references
        made, call = self._values.results(result), self._call
        self._recorded.calls.append(
            Call(operator, operands, named, made, line=call.line, backward=call.backward)
        )
