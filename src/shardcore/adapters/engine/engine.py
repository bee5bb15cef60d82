"""The engine: the state that all operators on one mesh share."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters import torch_private
from shardcore.adapters.engine.tensor import Form, Memory, ShardedTensor
from shardcore.adapters.ranks.job import process_group
from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.held_weights import (
    PER_STEP,
    PER_USE,
    LatestWeights,
    WeightSize,
    size_of,
)
from shardcore.domain.errors import ShardedTensorError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.memory_order import contiguous_strides
from shardcore.ports.world import World

_PLANS = 16384


class TensorClasses(Protocol):
    """The tensor classes of a strategy."""

    def kind(self, form: Form) -> type[torch.Tensor]:
        """Chooses the class of sharded tensors of `form`."""
        ...

    def adopt(self, engine: "Engine", tensor: torch.Tensor) -> ShardedTensor | None:
        """Converts a tensor of another library to a sharded one; None for a plain tensor."""
        ...


@attrs.define
class UnshardedWeights:
    """A cache of unsharded weights, each valid until it is written or the step ends (ADR 49).

    A recurrent layer uses its kernel at each time step, and the kernel is all-gathered once.
    """

    sizes: Sequence[WeightSize] = PER_USE
    # Each with its shard: no other tensor gets its address meanwhile.
    _latest: dict[WeightSize, LatestWeights[tuple[torch.Tensor, object]]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._latest = {size: LatestWeights(size) for size in self.sizes}

    def get(self, memory: Memory, part: torch.Tensor, move: Any, engine: Any) -> torch.Tensor:
        """Looks up the local shard of a weight after `move`; `part` is its stored shard."""
        stored = move.to_step_order(part)
        at = torch_private.memory_of(part), part.storage_offset()
        identity = (at, tuple(stored.shape), stored.stride(), part.dtype)
        writes = (memory.writes, torch_private.version_of(part))
        key = (id(memory), writes, identity, move.target)
        for latest in self._latest.values():
            cached = latest.find(key)
            if cached is not None:
                held: torch.Tensor = move.to_form_order(cached[0])
                return held
        value: torch.Tensor = move.run(part, engine)
        size = size_of(value.nbytes, self.sizes)
        if size is not None:
            held = move.to_step_order(value)
            self._latest[size].add(key, (held, (memory, part)), held.nbytes)
        return value

    @property
    def bytes(self) -> int:
        """The bytes of the weights that it holds."""
        return sum(latest.bytes for latest in self._latest.values())

    @property
    def holds_steps(self) -> bool:
        """Whether weights of any size are held until the step ends."""
        return self.sizes == PER_STEP

    def clear(self) -> None:
        """Drops all weights."""
        for latest in self._latest.values():
            latest.clear()


@attrs.define(eq=False)
class Engine:
    """The state of the operators on sharded tensors over one mesh."""

    world: World  # the mesh and the processes under it
    groups: "Mapping[str, dist.ProcessGroup]"  # by mesh axis, the group of this process
    classes: TensorClasses
    gathers: bool = False  # whether sharded weights are all-gathered for each use
    costs: Costs = attrs.field(factory=Costs)  # the costs of collectives along each mesh axis
    # The cache of all-gathered weights.
    unsharded: UnshardedWeights = attrs.field(factory=UnshardedWeights)
    # The plans of operators, by keys with all that they depend on.
    plans: "OrderedDict[Hashable, Any]" = attrs.field(factory=OrderedDict, init=False)
    # The number of finished steps; redistributed copies are valid for one step.
    steps: int = attrs.field(default=0, init=False)
    # How often each operator ran on full operands.
    fallbacks: Counter[str] = attrs.field(factory=Counter, init=False)
    # The operators that a warning has named for it.
    warned: set[str] = attrs.field(factory=set, init=False)
    _forms: dict[Hashable, Form] = attrs.field(factory=dict, init=False)

    def __reduce__(self) -> Any:
        """Refuses to be pickled, with the sharded tensors that have this engine."""
        raise ShardedTensorError(
            "A sharded tensor cannot be pickled, so torch.save cannot write it: this process has "
            "its shard only. Save the model by save_weights or shardcore.save_checkpoint, or what "
            "full_tensor() returns, which all ranks call."
        )

    def form(
        self,
        shape: tuple[int, ...],
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        strides: tuple[int, ...] | None = None,
        weight: bool = False,
    ) -> Form:
        """Looks up the one form with these fields: forms are compared by identity."""
        fields = (shape, strides, layout, dtype, device, weight)
        form = self._forms.get(fields)
        if form is None:
            strides = contiguous_strides(shape) if strides is None else strides
            key = (shape, strides, layout.normalized(shape), dtype, device, weight)
            form = self._forms[fields] = self._forms.setdefault(key, Form(*key))
        return form

    def evolved(self, form: Form, **changes: object) -> Form:
        """Looks up the form that differs from `form` in `changes`."""
        fields = attrs.asdict(form, recurse=False) | changes
        return self.form(**fields)

    def wrap(self, part: torch.Tensor, form: Form, memory: Memory | None = None) -> ShardedTensor:
        """Makes the sharded tensor of `form` with the local shard `part`."""
        tensor: ShardedTensor = torch_private.wrapper(
            self.classes.kind(form), form.shape, form.strides, form.dtype, form.device
        )
        tensor.part, tensor.form, tensor.engine = part, form, self
        tensor.memory, tensor.copied = Memory() if memory is None else memory, None
        return tensor

    def sharded(
        self, part: torch.Tensor, layout: Layout, shape: tuple[int, ...], weight: bool = False
    ) -> ShardedTensor:
        """Makes a contiguous sharded tensor of `part`, copied only if it has gaps."""
        form = self.form(shape, layout, part.dtype, part.device, weight=weight)
        return self.wrap(part.contiguous(), form)

    def replicated(self, value: torch.Tensor) -> ShardedTensor:
        """Wraps the plain `value`, equal on all ranks, with its strides."""
        layout = Layout.replicated(self.world.mesh, value.ndim)
        shape, strides = tuple(value.shape), tuple(value.stride())
        return self.wrap(value, self.form(shape, layout, value.dtype, value.device, strides))

    def as_sharded(self, tensor: torch.Tensor) -> ShardedTensor:
        """Converts `tensor` to one of this engine; a plain one counts as replicated (ADR 3)."""
        adopted = self.adopt(tensor)
        return self.replicated(tensor.detach()) if adopted is None else adopted

    def adopt(self, tensor: torch.Tensor) -> ShardedTensor | None:
        """Converts `tensor`, also one of another library, to a sharded one; None if it is plain.

        Raises:
            ShardedTensorError: If it is sharded over another mesh.
        """
        if not isinstance(tensor, ShardedTensor):
            return self.classes.adopt(self, tensor)
        self.check_mesh(tensor)
        return tensor

    def check_mesh(self, tensor: ShardedTensor) -> None:
        """Checks that `tensor` is over the mesh of this engine.

        Raises:
            ShardedTensorError: If it is over another one.
        """
        if tensor.engine is not self:
            raise ShardedTensorError(
                "One operator got sharded tensors of two distributions (meshes "
                f"{tensor.engine.world.mesh} and {self.world.mesh}): build the model and its data "
                "under one keras.distribution, or move a model by shardcore.distribute_model()."
            )

    def end_step(self) -> None:
        """Drops the copies that were redistributed for the uses of one step."""
        self.unsharded.clear()
        self.steps += 1

    def remember(self, key: Hashable, plan: object) -> None:
        """Stores the plan of an operator; drops the oldest one if there are too many."""
        self.plans[key] = plan
        if len(self.plans) > _PLANS:
            self.plans.popitem(last=False)


def process_groups(world: World) -> "dict[str, dist.ProcessGroup]":
    """Creates the process group of this process for each mesh axis.

    An axis over all processes has the group of the job. Only its own processes create any other
    group, so that the work of a rank at the start does not grow with the number of groups. If the
    user has bound the job's group to a device, NCCL splits it: all processes create each group.
    """
    timeout = timedelta(seconds=process_group.seconds(None))
    job: Any = dist.group.WORLD
    is_bound = job is not None and job.bound_device_id is not None
    groups: dict[str, dist.ProcessGroup] = {}

    def along(axis: str, position: int) -> tuple[int, ...]:
        return tuple(world.processes[peer] for peer in world.peers(axis, position))

    for axis in world.mesh.axis_names:
        own = along(axis, world.position)
        if len(own) == dist.get_world_size() and job is not None:
            groups[axis] = job
            continue
        positions = range(world.mesh.size) if is_bound else [world.position]
        for processes in sorted({along(axis, position) for position in positions}):
            group = dist.new_group(
                list(processes), timeout=timeout, use_local_synchronization=not is_bound
            )
            if processes == own:
                groups[axis] = group
    return groups
