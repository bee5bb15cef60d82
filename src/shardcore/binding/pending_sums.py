"""Pending sums that stand in for the states of metrics from step to step.

Each has a memory of its own for good, which recorded steps add to.
"""

from typing import Any

import torch

from shardcore.domain.layout import Layout, PartialAxes
from shardcore.ports.strategy import Strategy
from shardcore.ports.world import World


def of(variable: Any) -> Any:
    """What stands in for `variable`, None before its first sum, or if it was laid out anew."""
    stored, pending = getattr(variable, "_shardcore_pending", (None, None))
    return pending if stored is variable._value else None


def made(variable: Any, value: Any, strategy: Strategy) -> Any:
    """What stands in for `variable` from now on, with the pending sum `value`."""
    known = of(variable)
    if known is not None:
        write(variable, known, value, strategy)
        return known
    pending = copied(variable, value, strategy)
    variable._shardcore_pending = variable._value, pending
    return pending


def copied(_variable: Any, value: Any, _strategy: Strategy) -> Any:
    """What stands in for a variable in one step: the value, in memory of its own."""
    return value.detach() * 1


def write(variable: Any, pending: Any, value: Any, strategy: Strategy) -> None:
    """Overwrite `pending` in place. Of a value that is no such sum the first rank has all."""
    with torch.no_grad():
        layout = strategy.layout(pending)
        assert layout is not None, "a plain tensor is no pending sum"
        if strategy.layout(value) != layout:
            whole = strategy.whole(value)
            part = _share(whole, (), layout.partial, variable._shardcore_world)
            value = strategy.join(part, layout, tuple(whole.shape))
        strategy.assign(pending, value)


def joined(sums: list[Any], strategy: Strategy, world: World) -> Any:
    """Pending sums one behind the other, which is one over the axes of all of them."""
    layouts = [strategy.layout(each) for each in sums]
    pending = [() if layout is None else layout.partial for layout in layouts]
    order = world.mesh.axis_names
    axes = tuple(
        sorted({each for of_sum in pending for each in of_sum}, key=lambda a: order.index(a[0]))
    )
    parts = [
        _share(strategy.local(each), of_sum, axes, world).reshape(-1)
        for each, of_sum in zip(sums, pending, strict=True)
    ]
    flat = torch.cat(parts)
    return strategy.join(flat, Layout(world.mesh, (None,), axes), tuple(flat.shape))


def _share(part: Any, before: PartialAxes, after: PartialAxes, world: World) -> Any:
    """This rank's share of a sum that is pending over more axes than before: the first has all."""
    place = dict(zip(world.mesh.axis_names, world.mesh.coordinate(world.position), strict=True))
    is_first = not any(place[axis] for axis, op in after if (axis, op) not in before)
    return part if is_first else torch.zeros_like(part)
