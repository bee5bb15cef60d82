"""The states of metrics stay pending sums in a step, and are reduced together at its end.

Without it, each state of each metric is reduced by itself, at every step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from shardcore.binding.unread import NoLogs, Run, Unread
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.ports.strategy import Strategy
from shardcore.ports.whereabouts import reducing
from shardcore.ports.world import World


@attrs.frozen
class _Deferred:
    """A variable that holds a pending sum for now.

    Args:
        variable: The Keras variable.
        stored: What it kept before, and will keep.
        strategy: Who keeps it.
    """

    variable: Any
    stored: Any
    strategy: Strategy[torch.Tensor]


@attrs.define
class MetricSums:
    """The sums that are deferred in a step, and from step to step where no callback reads them.

    A pending sum stands in for what the variable keeps, so whoever reads it meanwhile reads its
    value. It is done, with all the others, before the results of the metrics are asked for, and at
    the latest at the end of the step; or of the epoch, if its steps are unread.
    """

    _steps: int = attrs.field(default=0, init=False)
    _unread: Unread | None = attrs.field(default=None, init=False)
    _deferred: dict[int, _Deferred] = attrs.field(factory=dict, init=False)

    @contextmanager
    def step(self, unread: Unread | None = None) -> Iterator[None]:
        """The step of a model: sums are deferred in it, those of `unread` to the next steps too."""
        before, self._unread = self._unread, unread
        self._steps += 1
        try:
            yield
            self.reduce()
        except BaseException:
            for each in self._due():  # the step has failed: as if it had not begun
                each.variable._value = each.stored
            raise
        finally:
            self._steps -= 1
            self._unread = before

    @contextmanager
    def run(self, run: Run) -> Iterator[None]:
        """A fit or an evaluate with all its steps: nothing is deferred longer."""
        try:
            yield
        except BaseException:
            if run.unread is not None:  # no rank knows whether the others are here too
                self._lose()
            raise
        if run.unread is not None:
            self.reduce()

    def resume(self, unread: Unread | None) -> str:
        """Before a step, and outside its recording: the states of `unread` are pending sums again.

        Returns:
            Which of them are, empty if a callback reads the step: steps that differ in it do
            different things.
        """
        if unread is None:
            self.reduce()
            return ""
        for variable in unread.states:
            pending = _stand_in(variable)
            if id(variable) not in self._deferred and pending is not None:
                strategy = variable._shardcore_session.strategy
                _write(variable, pending, variable._value, strategy)
                self._keep_pending(variable, pending, strategy)
        numbers = [number for number, v in enumerate(unread.states) if id(v) in self._deferred]
        return f"unread, pending {numbers}"

    def defer(self, variable: Any, value: Any, strategy: Strategy[torch.Tensor]) -> bool:
        """Keeps `value` pending in `variable`, and returns whether it does.

        It does so for a pending sum and the state of a metric, which Keras reads seldom.
        """
        unread = self._is_unread(variable)
        if unread and id(variable) in self._deferred:
            _write(variable, variable._value, value, strategy)
            return True
        known = self._deferred.pop(id(variable), None)
        if known is not None:
            variable._value = known.stored
        if not self._steps or variable.synchronization != "on_read":
            return False
        if not variable._shardcore_layout.is_replicated or not _is_sum(value, strategy):
            return False
        # In memory of its own: the value of one step, or a stand-in that is kept.
        pending = _kept_copy(variable, value, strategy) if unread else value.detach() * 1
        self._keep_pending(variable, pending, strategy)
        return True

    def _keep_pending(self, variable: Any, pending: Any, strategy: Strategy[torch.Tensor]) -> None:
        self._deferred[id(variable)] = _Deferred(variable, variable._value, strategy)
        variable._value = pending

    def reduce(self) -> None:
        """Reduces what is deferred, but for what is deferred to the next step."""
        alike: dict[Any, list[_Deferred]] = {}
        for each in self._due():
            alike.setdefault((id(each.strategy), each.variable._value.dtype), []).append(each)
        with torch.no_grad():
            for those in alike.values():
                _reduce_together(those)

    def _lose(self) -> None:
        """Makes what is deferred not a number: beside the counts it would give a wrong mean."""
        for each in self._due():
            each.variable._value = each.stored
            if each.stored.dtype.is_floating_point:
                lost = torch.full(each.stored.shape, torch.nan, dtype=each.stored.dtype)
                each.strategy.assign(each.stored, lost.to(each.stored.device))

    def _due(self) -> list[_Deferred]:
        """Takes what is deferred, but for what is deferred to the next step."""
        due = [w for w in self._deferred.values() if not self._is_unread(w.variable)]
        for each in due:
            del self._deferred[id(each.variable)]
        return due

    def _is_unread(self, variable: Any) -> bool:
        return self._unread is not None and variable in self._unread

    def results(self, original: Callable[..., Any], trainer: Any) -> Any:
        """`Trainer.get_metrics_result`: it asks every metric for its result."""
        if self._unread is not None and self._unread.trainer is trainer:
            return NoLogs()
        self.reduce()
        return original(trainer)


def _is_sum(value: Any, strategy: Strategy[torch.Tensor]) -> bool:
    layout = strategy.layout(value)
    if layout is None or any(each is not None for each in layout.spec):
        return False
    return bool(layout.partial) and all(op == "sum" for _, op in layout.partial)


def _reduce_together(those: list[_Deferred]) -> None:
    values = [each.variable._value for each in those]
    strategy, world = those[0].strategy, those[0].variable._shardcore_world
    flat = _joined(values, strategy, world)
    with reducing([each.stored for each in those]):
        done = strategy.activation(flat, None)
    parts = torch.split(done, [value.numel() for value in values])
    for each, value, part in zip(those, values, parts, strict=True):
        each.variable._value = each.stored
        strategy.assign(each.stored, part.reshape(value.shape))


def _stand_in(variable: Any) -> Any:
    """Returns the pending sum that stands in for `variable` from step to step, if it has one.

    It has memory of its own for good, which recorded steps add to; None before the first sum, or
    if the variable was laid out again.
    """
    stored, pending = getattr(variable, "_shardcore_pending", (None, None))
    return pending if stored is variable._value else None


def _kept_copy(variable: Any, value: Any, strategy: Strategy[torch.Tensor]) -> Any:
    """Makes the stand-in of `variable`, with the pending sum `value`."""
    known = _stand_in(variable)
    if known is not None:
        _write(variable, known, value, strategy)
        return known
    pending = value.detach() * 1
    variable._shardcore_pending = variable._value, pending
    return pending


def _write(variable: Any, pending: Any, value: Any, strategy: Strategy[torch.Tensor]) -> None:
    """Overwrite `pending` in place. Of a value that is no such sum the first rank has all."""
    with torch.no_grad():
        layout = strategy.layout(pending)
        assert layout is not None, "a plain tensor is no pending sum"
        if strategy.layout(value) != layout:
            whole = strategy.whole(value)
            part = _share(whole, (), layout.partial, variable._shardcore_world)
            value = strategy.join(part, layout, tuple(whole.shape))
        strategy.assign(pending, value)


def _joined(sums: list[Any], strategy: Strategy[torch.Tensor], world: World) -> Any:
    """Concatenates pending sums of several axes into one over all of these axes."""
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
