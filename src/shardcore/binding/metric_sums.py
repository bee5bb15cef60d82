"""Sums that the metrics of a step are assigned: they wait for each other, and are reduced together.

Without it, each state of each metric is reduced by itself, at every step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import attrs
import torch

from shardcore.binding import pending_sums
from shardcore.binding.unread import NoLogs, Run, Unread
from shardcore.ports.strategy import Strategy
from shardcore.ports.whereabouts import reducing


@attrs.frozen
class _Waiting:
    """A variable that holds a pending sum for now.

    Args:
        variable: The Keras variable.
        stored: What it kept before, and will keep.
        strategy: Who keeps it.
    """

    variable: Any
    stored: Any
    strategy: Strategy


@attrs.define
class WaitingSums:
    """What waits in the step that runs now, and from step to step where nobody reads it.

    A pending sum stands in for what the variable keeps, so whoever reads it meanwhile reads its
    value. It is done, with all the others, before the results of the metrics are asked for, and at
    the latest when the step is through; or the epoch, if its steps are unread.
    """

    _steps: int = attrs.field(default=0, init=False)
    _unread: Unread | None = attrs.field(default=None, init=False)
    _waiting: dict[int, _Waiting] = attrs.field(factory=dict, init=False)

    @contextmanager
    def step(self, unread: Unread | None = None) -> Iterator[None]:
        """The step of a model: sums may wait in it.

        Args:
            unread: Whose sums wait for the next steps too.
        """
        before, self._unread = self._unread, unread
        self._steps += 1
        try:
            yield
            self.settle()
        except BaseException:
            for each in self._due():  # the step has failed: as if it had not begun
                each.variable._value = each.stored
            raise
        finally:
            self._steps -= 1
            self._unread = before

    @contextmanager
    def run(self, run: Run) -> Iterator[None]:
        """A fit or an evaluate with all its steps: nothing waits longer."""
        try:
            yield
        except BaseException:
            if run.unread is not None:  # no rank knows whether the others are here too
                self._lose()
            raise
        if run.unread is not None:
            self.settle()

    def resume(self, unread: Unread | None) -> str:
        """Before a step, and outside its recording: the states of `unread` are pending sums again.

        Returns:
            Which of them are, empty if somebody reads the step: steps that differ in it do
            different things.
        """
        if unread is None:
            self.settle()
            return ""
        for variable in unread.states:
            pending = pending_sums.of(variable)
            if id(variable) not in self._waiting and pending is not None:
                strategy = variable._shardcore_session.strategy
                pending_sums.write(variable, pending, variable._value, strategy)
                self._wait(variable, pending, strategy)
        waiting = [number for number, v in enumerate(unread.states) if id(v) in self._waiting]
        return f"unread, pending {waiting}"

    def hold(self, variable: Any, value: Any, strategy: Strategy) -> bool:
        """Whether `value` waits in `variable` from now on.

        It does if it is a pending sum, for the state of a metric, which Keras reads seldom.
        """
        unread = self._is_unread(variable)
        if unread and id(variable) in self._waiting:
            pending_sums.write(variable, variable._value, value, strategy)
            return True
        known = self._waiting.pop(id(variable), None)
        if known is not None:
            variable._value = known.stored
        if not self._steps or variable.synchronization != "on_read":
            return False
        if not variable._shardcore_layout.is_replicated or not _is_sum(value, strategy):
            return False
        make = pending_sums.made if unread else pending_sums.copied
        self._wait(variable, make(variable, value, strategy), strategy)
        return True

    def _wait(self, variable: Any, pending: Any, strategy: Strategy) -> None:
        self._waiting[id(variable)] = _Waiting(variable, variable._value, strategy)
        variable._value = pending

    def settle(self) -> None:
        """Reduce what waits, and let the variables keep it; not what waits for the next step."""
        alike: dict[Any, list[_Waiting]] = {}
        for each in self._due():
            alike.setdefault((id(each.strategy), each.variable._value.dtype), []).append(each)
        with torch.no_grad():
            for those in alike.values():
                _settle_together(those)

    def _lose(self) -> None:
        """What waits cannot be known any more; the counts beside it would make it a wrong mean."""
        for each in self._due():
            each.variable._value = each.stored
            if each.stored.dtype.is_floating_point:
                lost = torch.full(each.stored.shape, torch.nan, dtype=each.stored.dtype)
                each.strategy.assign(each.stored, lost.to(each.stored.device))

    def _due(self) -> list[_Waiting]:
        """Take what waits, but for what waits for the next step."""
        due = [w for w in self._waiting.values() if not self._is_unread(w.variable)]
        for each in due:
            del self._waiting[id(each.variable)]
        return due

    def _is_unread(self, variable: Any) -> bool:
        return self._unread is not None and variable in self._unread

    def before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Trainer.get_metrics_result`: it asks every metric for its result."""

        @wraps(original)
        def get_metrics_result(trainer: Any) -> Any:
            if self._unread is not None and self._unread.trainer is trainer:
                return NoLogs()
            self.settle()
            return original(trainer)

        return get_metrics_result


def _is_sum(value: Any, strategy: Strategy) -> bool:
    layout = strategy.layout(value)
    if layout is None or any(each is not None for each in layout.spec):
        return False
    return bool(layout.partial) and all(op == "sum" for _, op in layout.partial)


def _settle_together(those: list[_Waiting]) -> None:
    values = [each.variable._value for each in those]
    strategy, world = those[0].strategy, those[0].variable._shardcore_world
    flat = pending_sums.joined(values, strategy, world)
    with reducing([each.stored for each in those]):
        done = strategy.activation(flat, None)
    parts = torch.split(done, [value.numel() for value in values])
    for each, value, part in zip(those, values, parts, strict=True):
        each.variable._value = each.stored
        strategy.assign(each.stored, part.reshape(value.shape))
