"""Metric states: partial sums during a step, reduced together at its end (ADR 17).

Without it, each state of each metric is reduced separately, at every step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from keras import Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, storage_of, tensor_of
from shardcore.binding.trainer_run import TrainerRun
from shardcore.binding.types import Original, TorchStrategy
from shardcore.domain.layouts.layout import Layout, PartialAxes
from shardcore.ports.measurement import reduction_scope
from shardcore.ports.world import World


class DeferredLogs(dict[str, Any]):
    """The logs of a step whose metrics are deferred."""


@replaces(
    "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs",
    reason="Steps whose results no callback reads have not computed them.",
)
def results_of_epoch(original: Original, trainer: Model, logs: object) -> Any:
    """Replaces `Trainer._get_metrics_result_or_logs`: deferred results come from the metrics."""
    is_deferred = isinstance(logs, DeferredLogs)
    return trainer.get_metrics_result() if is_deferred else original(trainer, logs)


@attrs.frozen
class _Deferred:
    """A Keras variable that temporarily holds a partial sum."""

    variable: Variable
    stored: torch.Tensor  # its tensor before and after
    strategy: TorchStrategy


@attrs.define
class MetricSums:
    """The sums that are deferred in a step, or from step to step if no callback reads them.

    A partial sum replaces the tensor of the variable, so a read in between gets its value. All
    deferred sums are reduced together before the results of the metrics are computed, and at the
    latest at the end of the step. If no callback reads the steps, it is the end of the epoch.
    """

    _steps: int = attrs.field(default=0, init=False)
    _run: TrainerRun | None = attrs.field(default=None, init=False)  # its metrics are deferred
    _deferred: dict[int, _Deferred] = attrs.field(factory=dict, init=False)

    @property
    def are_deferred(self) -> bool:
        """Whether a variable holds a partial sum now."""
        return bool(self._deferred)

    @contextmanager
    def step(self, run: TrainerRun | None = None) -> Iterator[None]:
        """Opens a step, which defers sums; sums of the metrics of `run` also to later steps."""
        before, self._run = self._run, run
        self._steps += 1
        try:
            yield
            self.reduce()
        except BaseException:
            self._invalidate()
            raise
        finally:
            self._steps -= 1
            self._run = before

    @contextmanager
    def run(self, run: TrainerRun) -> Iterator[None]:
        """Opens a fit or an evaluate, at whose end all deferred sums are reduced."""
        try:
            yield
        except BaseException:
            if run.deferred:  # the other ranks may not reach a collective here
                self._invalidate()
            raise
        if run.deferred:
            self.reduce()

    def resume(self, run: TrainerRun | None) -> tuple[int, ...] | None:
        """Makes the deferred metrics of `run` partial sums again, before a step and its trace.

        Returns:
            The positions of these states, which are part of the key of traces; None if a callback
            reads the step.
        """
        if run is None:
            self.reduce()
            return None
        for variable in run.deferred:
            pending = _stand_in(variable)
            if id(variable) not in self._deferred and pending is not None:
                strategy = storage_of(variable).session.strategy
                _write(variable, pending, tensor_of(variable), strategy)
                self._store_pending(variable, pending, strategy)
        return tuple(at for at, v in enumerate(run.deferred) if id(v) in self._deferred)

    def defer(self, variable: Variable, value: torch.Tensor, strategy: TorchStrategy) -> bool:
        """Stores `value` partial in `variable`, and tells whether it did.

        It does so for a partial sum in the state of a metric, which Keras reads seldom.
        """
        across_steps = self._is_deferred(variable)
        if across_steps and id(variable) in self._deferred:
            _write(variable, tensor_of(variable), value, strategy)
            return True
        known = self._deferred.pop(id(variable), None)
        if known is not None:
            set_tensor(variable, known.stored)
        if not self._steps or variable.synchronization != "on_read":
            return False
        layout = storage_of(variable).layout
        if layout is None or not layout.is_replicated or not _is_sum(value, strategy):
            return False
        # In separate memory: the value of one step, or a persistent stand-in.
        pending = _stand_in_of(variable, value, strategy) if across_steps else value.detach() * 1
        self._store_pending(variable, pending, strategy)
        return True

    def _store_pending(
        self, variable: Variable, pending: torch.Tensor, strategy: TorchStrategy
    ) -> None:
        self._deferred[id(variable)] = _Deferred(variable, tensor_of(variable), strategy)
        set_tensor(variable, pending)

    def reduce(self) -> None:
        """Reduces the deferred sums, except those deferred to the next step."""
        alike: dict[Any, list[_Deferred]] = {}
        for deferred in self._take_due():
            key = id(deferred.strategy), tensor_of(deferred.variable).dtype
            alike.setdefault(key, []).append(deferred)
        with torch.no_grad():
            for group in alike.values():
                _reduce_together(group)

    def _invalidate(self) -> None:
        """Sets the deferred sums to nan: with the counts they would give a wrong mean."""
        for deferred in self._take_due():
            set_tensor(deferred.variable, deferred.stored)
            if deferred.stored.dtype.is_floating_point:
                lost = torch.full(deferred.stored.shape, torch.nan, dtype=deferred.stored.dtype)
                deferred.strategy.assign(deferred.stored, lost.to(deferred.stored.device))

    def _take_due(self) -> list[_Deferred]:
        """Takes the deferred sums, except those deferred to the next step."""
        due = [d for d in self._deferred.values() if not self._is_deferred(d.variable)]
        for deferred in due:
            del self._deferred[id(deferred.variable)]
        return due

    def _is_deferred(self, variable: Variable) -> bool:
        return self._run is not None and any(v is variable for v in self._run.deferred)

    @replaces(
        "keras.src.backend.torch.trainer:TorchTrainer.get_metrics_result",
        reason="The states of all metrics are reduced together, before the first is read.",
    )
    def results(self, _original: Original, trainer: Model) -> Any:
        """Replaces `TorchTrainer.get_metrics_result`, which computes the result of every metric."""
        if self._run is not None and self._run.trainer is trainer:
            return DeferredLogs()
        self.reduce()
        results = keras_private.results_of(trainer)
        return results if self._steps else keras_private.as_logs(results)


def _is_sum(value: torch.Tensor, strategy: TorchStrategy) -> bool:
    layout = strategy.layout(value)
    if layout is None or any(axes is not None for axes in layout.spec):
        return False
    return bool(layout.partial) and all(op == "sum" for _, op in layout.partial)


def _reduce_together(group: list[_Deferred]) -> None:
    values = [tensor_of(deferred.variable) for deferred in group]
    strategy, world = group[0].strategy, storage_of(group[0].variable).session.world
    flat = _concatenate(values, strategy, world)
    with reduction_scope([deferred.stored for deferred in group]):
        reduced = strategy.redistribute(flat, None)
    parts = torch.split(reduced, [value.numel() for value in values])
    for deferred, value, part in zip(group, values, parts, strict=True):
        set_tensor(deferred.variable, deferred.stored)
        strategy.assign(deferred.stored, part.reshape(value.shape))


def _stand_in(variable: Variable) -> Any:
    """Looks up the partial sum that replaces `variable` from step to step.

    It has persistent memory, to which recorded steps add; None before the first sum, or if the
    variable was laid out again.
    """
    stored, pending = getattr(variable, "_shardcore_pending", (None, None))
    return pending if stored is tensor_of(variable) else None


def _stand_in_of(variable: Variable, value: torch.Tensor, strategy: TorchStrategy) -> Any:
    """Creates the stand-in of `variable`, with the partial sum `value`."""
    known = _stand_in(variable)
    if known is not None:
        _write(variable, known, value, strategy)
        return known
    pending = value.detach() * 1
    variable._shardcore_pending = tensor_of(variable), pending
    return pending


def _write(
    variable: Variable, pending: torch.Tensor, value: torch.Tensor, strategy: TorchStrategy
) -> None:
    """Overwrites `pending` in place. If `value` is not partial, the first rank stores all of it."""
    with torch.no_grad():
        layout = strategy.layout(pending)
        assert layout is not None, "a plain tensor is no partial sum"
        if strategy.layout(value) != layout:
            full = strategy.full_tensor(value)
            part = _share(full, (), layout.partial, storage_of(variable).session.world)
            value = strategy.from_local(part, layout, tuple(full.shape))
        strategy.assign(pending, value)


def _concatenate(sums: list[torch.Tensor], strategy: TorchStrategy, world: World) -> Any:
    """Concatenates partial sums over several axes into one over all of these axes."""
    layouts = [strategy.layout(partial_sum) for partial_sum in sums]
    pending = [() if layout is None else layout.partial for layout in layouts]
    order = world.mesh.axis_names
    all_axes = {axis for of_sum in pending for axis in of_sum}
    axes = tuple(sorted(all_axes, key=lambda axis: order.index(axis[0])))
    parts = [
        _share(strategy.to_local(partial_sum), of_sum, axes, world).reshape(-1)
        for partial_sum, of_sum in zip(sums, pending, strict=True)
    ]
    flat = torch.cat(parts)
    return strategy.from_local(flat, Layout(world.mesh, (None,), axes), tuple(flat.shape))


def _share(part: torch.Tensor, before: PartialAxes, after: PartialAxes, world: World) -> Any:
    """Makes a sum partial over more axes: the first rank has all of it, the others have zeros."""
    coordinate = dict(
        zip(world.mesh.axis_names, world.mesh.coordinate(world.position), strict=True)
    )
    is_first = not any(coordinate[axis] for axis, op in after if (axis, op) not in before)
    return part if is_first else torch.zeros_like(part)
