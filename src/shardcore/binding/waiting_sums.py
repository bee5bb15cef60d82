"""Sums that the metrics of a step are assigned: they wait for each other, and are reduced together.

Without it, each state of each metric is reduced by itself, at every step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import attrs
import torch

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
    """What waits in the step that runs now.

    A pending sum stands in for what the variable keeps, so whoever reads it meanwhile reads its
    value. It is done, with all the others, before the results of the metrics are asked for, and at
    the latest when the step is through.
    """

    _steps: int = attrs.field(default=0, init=False)
    _waiting: dict[int, _Waiting] = attrs.field(factory=dict, init=False)

    @contextmanager
    def step(self) -> Iterator[None]:
        """The step of a model: sums may wait in it."""
        self._steps += 1
        try:
            yield
            self.settle()
        finally:
            self._steps -= 1
            for each in self._waiting.values():  # the step has failed: as if it had not begun
                each.variable._value = each.stored
            self._waiting.clear()

    def hold(self, variable: Any, value: Any, strategy: Strategy) -> bool:
        """Whether `value` waits in `variable` from now on.

        It does if it is a pending sum, for the state of a metric, which Keras reads seldom.
        """
        if not self._steps or variable.synchronization != "on_read":
            return False
        known = self._waiting.pop(id(variable), None)
        if known is not None:
            variable._value = known.stored
        if not variable._shardcore_layout.is_replicated or not _is_sum(value, strategy):
            return False
        self._waiting[id(variable)] = _Waiting(variable, variable._value, strategy)
        variable._value = value.detach() * 1  # not the memory of somebody else
        return True

    def settle(self) -> None:
        """Reduce what waits, and let the variables keep it."""
        alike: dict[Any, list[_Waiting]] = {}
        for each in self._waiting.values():
            value = each.variable._value
            layout = each.strategy.layout(value)
            assert layout is not None, "a plain tensor is no pending sum"
            alike.setdefault((id(each.strategy), value.dtype, layout.partial), []).append(each)
        self._waiting = {}
        with torch.no_grad():
            for those in alike.values():
                _settle_together(those)

    def before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Trainer.get_metrics_result`: it asks every metric for its result."""

        @wraps(original)
        def get_metrics_result(trainer: Any) -> Any:
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
    strategy = those[0].strategy
    flat = torch.cat([value.reshape(-1) for value in values])
    with reducing([each.stored for each in those]):
        done = strategy.activation(flat, None)
    parts = torch.split(done, [value.numel() for value in values])
    for each, value, part in zip(those, values, parts, strict=True):
        each.variable._value = each.stored
        strategy.assign(each.stored, part.reshape(value.shape))
