"""The implementation of the port `ShardedTensors`: strategies use the engine through it."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters.engine import autograd, redistribution
from shardcore.adapters.engine.declared import rules as declared
from shardcore.adapters.engine.engine import Engine, TensorClasses, UnshardedWeights, process_groups
from shardcore.adapters.engine.operators.views import read_indices_by_operators
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import shard_like
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.adapters.ranks.job.threads import communicating
from shardcore.domain.cost.collective_cost import Costs, Link, links_of
from shardcore.domain.cost.gradients import is_reduced_at_output, layout_at_output
from shardcore.domain.engine.held_weights import PER_STEP, PER_USE
from shardcore.domain.errors import RankMismatchError
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.world import World


def open_engine(
    world: World,
    classes: Callable[[World, Mapping[str, dist.ProcessGroup]], TensorClasses],
    weights: str,
    gathered: str,
    links: Mapping[str, Link],
) -> "EngineTensors":
    """Opens the engine over `world`. All processes open it together, with equal options.

    `weights`, `gathered` and `links` are the options of the strategies: see `builtin_plugins`.
    """
    read_indices_by_operators()
    hosts = _hosts(f"weights={weights!r}, gathered={gathered!r}, links={dict(links)}")
    groups_of = {
        axis: tuple(
            tuple(world.processes[rank] for rank in group) for group in world.mesh.axis_groups(axis)
        )
        for axis in world.mesh.axis_names
    }
    costs = Costs(links_of(groups_of, hosts, links))
    groups = process_groups(world)
    unsharded = UnshardedWeights(PER_STEP if gathered == "per_step" else PER_USE)
    engine = Engine(world, groups, classes(world, groups), weights == "gather", costs, unsharded)
    return EngineTensors(engine)


def _hosts(options: str) -> tuple[str, ...]:
    """Lists the host of each process. A collective.

    Ranks with other options, or other declared rules, would plan other collectives, and hang
    (ADR 26): all raise an error.
    """
    own = (options, declared.texts(), socket.gethostname())
    if process_group.is_simulated():
        return (own[2],) * process_group.world_size()
    of_ranks = exchange.gather(own)
    first, rules, _ = of_ranks[0]
    for rank, (other, other_rules, _) in enumerate(of_ranks):
        for operator in sorted({**rules, **other_rules}):
            texts = [of_rank.get(operator, "none") for of_rank in (rules, other_rules)]
            if texts[0] != texts[1]:
                raise RankMismatchError(
                    f"Rank 0 has the rule {texts[0]!r} for operator {operator}, and rank {rank} "
                    f"has {texts[1]!r}: declare it alike on every rank, by "
                    "shardcore.operator_rule() before the distribution is set.",
                    name=operator,
                    expected=texts[0],
                    got=texts[1],
                    rank=rank,
                )
        if other != first:
            raise RankMismatchError(
                f"Rank 0 installed its strategy with {first}, and rank {rank} with {other}: "
                "give shardcore.install() the same options on every rank."
            )
    return tuple(host for *_, host in of_ranks)


@attrs.frozen(eq=False)
class EngineTensors:
    """The port `ShardedTensors` over the mesh of an engine."""

    engine: Engine
    _buckets: autograd.Buckets = attrs.field(factory=autograd.Buckets, init=False)

    @property
    def world(self) -> World:
        """The mesh and the processes under it."""
        return self.engine.world

    def owns(self, tensor: torch.Tensor) -> bool:
        """Leaves out plain tensors, and those over another mesh."""
        return self._own(tensor) is not None

    def _own(self, tensor: torch.Tensor) -> Any:
        """Adopts `tensor`; None if it is plain or of another mesh."""
        if isinstance(tensor, ShardedTensor):
            return tensor if tensor.engine is self.engine else None
        return self.engine.adopt(tensor)

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """Reads the layout of `tensor`, None if it is plain."""
        own = self._own(tensor)
        return None if own is None else own.form.layout

    def shard(self, value: torch.Tensor, layout: Layout) -> Any:
        """Copies this rank's shard of `value`, so that the full tensor can be freed."""
        return autograd.redistribute(value, layout, self.engine)

    def mark_weight(self, tensor: Any) -> Any:
        """Marks `tensor` itself, and returns it."""
        tensor.form = self.engine.evolved(tensor.form, weight=True)
        return tensor

    def from_local(self, part: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> Any:
        """Makes the tensor of global `shape` with the local shard `part`; differentiable."""
        expected = layout.local_shape(shape, self.engine.world.position)
        assert tuple(part.shape) == expected, f"{tuple(part.shape)} is not {expected} of {layout}"
        return autograd.from_local(part, layout, shape, self.engine)

    def redistribute(self, tensor: torch.Tensor, layout: Layout) -> Any:
        """Redistributes `tensor`, differentiably; the same one if it is in `layout`."""
        own = self._own(tensor)
        if own is tensor and tensor.form.layout == layout.normalized(tensor.form.shape):
            return tensor
        return autograd.redistribute(tensor, layout, self.engine)

    def reduce_partial(self, tensor: torch.Tensor) -> Any:
        """Reduces the output of a layer in the forward and in the backward pass (ADR 4)."""
        own = self._own(tensor)
        if own is None:
            return tensor
        layout = own.form.layout
        done = self.redistribute(tensor, layout.reduced)
        if done.requires_grad and done.grad_fn is not None and is_reduced_at_output(layout):
            done.register_hook(partial(_at_output, layout))
        return done

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gathers a plain, detached tensor; a large weight piece by piece."""
        own = self._own(tensor)
        if own is None:
            return tensor.detach()
        own = own.detach()
        form = own.form
        if form.weight and not form.is_replicated and own.nbytes > redistribution.GATHERED_BYTES:
            return redistribution.gather_in_pieces(redistribution.reduced(own))
        return redistribution.clone_if_cached(own, redistribution.full(own))

    def to_local(self, tensor: Any) -> torch.Tensor:
        """Takes the local shard, which shares the memory of `tensor`; differentiable."""
        return tensor if self._own(tensor) is None else tensor.to_local()  # type: ignore[no-any-return]

    def copy_into(self, stored: Any, value: torch.Tensor) -> None:
        """Overwrites `stored` in place."""
        with torch.no_grad():
            stored.part.copy_(shard_like(value.detach(), stored))
            stored.memory.writes += 1

    def redistribute_gradients(self, stored: torch.Tensor, layout: Layout) -> None:
        """Redistributes each gradient into `layout`, by the end of the backward pass."""

        def accumulated(parameter: torch.Tensor) -> None:
            autograd.reduce_gradient(parameter, layout, self._buckets)

        stored.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    @contextmanager
    def implicit_replication(self, forbid_collectives: bool = False) -> Iterator[None]:
        """Opens the scope of a distribution, in which its thread may start collectives."""
        if forbid_collectives:
            yield
            return
        try:
            # The backward pass runs on this thread; for CUDA tensors torch uses other threads.
            with communicating(), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self.engine.end_step()


def _at_output(output: Layout, gradient: torch.Tensor) -> Any:
    """Reduces the gradient of an output, and shards it as the output."""
    if not isinstance(gradient, ShardedTensor):
        return gradient
    return autograd.gradient_in(gradient, layout_at_output(gradient.form.layout, output))
