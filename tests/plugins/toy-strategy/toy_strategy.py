"""A strategy as a third party would write it: everything whole, and every life event counted."""

from collections import Counter
from contextlib import nullcontext

from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import StrategyEntry

events: Counter = Counter()


class Toy:
    """Keeps every variable whole, for one device."""

    def storage(self, variable):
        return variable.layout

    def create(self, value, storage, variable):
        events["create"] += 1
        return value

    def redistribute_gradients(self, stored, storage):
        events["redistribute_gradients"] += 1

    def assign(self, stored, value):
        events["assign"] += 1
        stored.copy_(value)

    def from_local(self, part, layout, shape):
        return part

    def redistribute(self, tensor, layout):
        return tensor

    def full_tensor(self, tensor):
        return tensor.detach()

    def to_local(self, tensor):
        return tensor

    def owns(self, tensor):
        return False

    def layout(self, tensor):
        return None

    def implicit_replication(self, forbid_collectives=False):
        return nullcontext()


def why_unavailable():
    import os

    return os.environ.get("TOY_IS_UNAVAILABLE")


@hookimpl
def shardcore_strategies():
    return [StrategyEntry("toy", "An example.", lambda world: Toy(), why_unavailable)]
