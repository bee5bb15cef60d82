"""Strategies that break one promise each, as mistakes that an author could make."""

import sys

import torch

from shardcore.builtin_plugins import open_dtensor
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import StrategyEntry
from shardcore.strategies.sharded import ShardedStrategy
from shardcore.strategies.single_device import SingleDeviceStrategy


class CreatesFloats(ShardedStrategy):
    def create(self, value, storage, variable):
        return super().create(value.float(), storage, variable)


class StoresWhole(ShardedStrategy):
    def create(self, value, storage, variable):
        position = self.tensors.world.position
        view = value[storage.slices(value.shape, position)]  # and it keeps what it is a view of
        return self.tensors.from_local(view, storage, tuple(value.shape))


class ForgetsLayout(ShardedStrategy):
    def layout(self, tensor):
        layout = super().layout(tensor)
        return layout and Layout.replicated(layout.mesh, layout.ndim)


class ReadsItsPart(ShardedStrategy):
    def full_tensor(self, tensor):
        whole = super().full_tensor(tensor).clone()
        layout = self.layout(tensor)
        if layout is not None:
            here = layout.slices(whole.shape, self.tensors.world.position)
            whole[here], whole = super().full_tensor(tensor)[here], torch.zeros_like(whole)
        return whole


class AssignsOnRank0(ShardedStrategy):
    def assign(self, stored, value):
        here = self.to_local(stored).clone()
        super().assign(stored, value)
        if self.tensors.world.position:
            self.to_local(stored).copy_(here)


class LosesTheRest(ShardedStrategy):
    def create(self, value, storage, variable):
        rows = len(value) - len(value) % 2 if value.ndim else 0
        value[rows:] *= value.ndim == 0
        return super().create(value, storage, variable)


class JoinsZeros(ShardedStrategy):
    def from_local(self, part, layout, shape):
        return super().from_local(part * (self.tensors.world.position == 0), layout, shape)


class LeavesSumsPending(ShardedStrategy):
    def redistribute(self, tensor, layout):
        return tensor if layout is None else super().redistribute(tensor, layout)


class AsksTheOthers(ShardedStrategy):
    def to_local(self, tensor):
        self.tensors.full_tensor(tensor)
        return super().to_local(tensor)


class KeepsTheFirstAxis(ShardedStrategy):
    def create(self, value, storage, variable):
        first = [axes[0] if isinstance(axes, tuple) else axes for axes in storage.spec]
        return super().create(value, Layout(storage.mesh, tuple(first)), variable)


class AveragesGradients(ShardedStrategy):
    def redistribute_gradients(self, stored, storage):
        super().redistribute_gradients(stored, storage)

        def average(parameter):
            parameter.grad /= storage.mesh.axis_size("data")

        stored.register_post_accumulate_grad_hook(average)


class LeavesGradientsPending(ShardedStrategy):
    def redistribute_gradients(self, stored, storage):
        def bring(parameter):  # where its variable is, but for the sums
            pending = self.layout(parameter.grad).partial
            spec = storage.without(*dict(pending)).spec
            layout = Layout(storage.mesh, spec, pending)
            # A copy: into a view of a partial sum nothing can be added without doing the sum.
            parameter.grad = self.tensors.redistribute(parameter.grad.detach(), layout).clone()

        stored.register_post_accumulate_grad_hook(bring)


class AveragesSums(ShardedStrategy):
    def redistribute(self, tensor, layout):
        found = self.layout(tensor)
        pending = found is not None and found.partial
        return super().redistribute(tensor, layout) / (found.mesh.size if pending else 1)


class AssignsOwnKindOnly(ShardedStrategy):
    def assign(self, stored, value):
        if self.owns(value):
            super().assign(stored, value)


class HidesErrors(ShardedStrategy):
    def implicit_replication(self, forbid_collectives=False):
        sys.excepthook = sys.__excepthook__
        return super().implicit_replication(forbid_collectives)


class AttachedOne(SingleDeviceStrategy):
    def full_tensor(self, tensor):
        return tensor


class OpenedOnSeveral(SingleDeviceStrategy):
    def __attrs_post_init__(self):
        """It refuses no mesh."""


class ForgetfulOne(SingleDeviceStrategy):
    def assign(self, stored, value):
        pass


KINDS = {kind.__name__.lower(): kind for kind in ShardedStrategy.__subclasses__()}
ONES = {kind.__name__.lower(): kind for kind in SingleDeviceStrategy.__subclasses__()}


def _opens(kind):
    return lambda world: open_dtensor(world, kind)


@hookimpl
def shardcore_strategies():
    kinds = {name: _opens(kind) for name, kind in KINDS.items()} | ONES
    return [StrategyEntry(name, "It is broken.", open_) for name, open_ in kinds.items()]
