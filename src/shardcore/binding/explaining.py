"""One step of a model, watched: what it moves between ranks, and why."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch

from shardcore.binding import agreement, sample_weights, seams, torch_modules
from shardcore.binding.explaining_calls import Calls
from shardcore.binding.metric_sums import MetricSums
from shardcore.binding.session import Session, Sessions
from shardcore.domain.errors import StrategyError
from shardcore.domain.explanation.advice import advise
from shardcore.domain.explanation.collectives import Collective, Phase, axes_of, counted, sent_bytes
from shardcore.domain.explanation.reasons import Cause, Facts, reason
from shardcore.ports.whereabouts import Seen, Watch
from shardcore.reporting.explanation import Explanation


def explain_model(
    model: Any, batch: Any, step: str, sessions: Sessions, watch: Watch
) -> Explanation:
    """What one step of `model` moves. A collective; nothing is changed by it.

    Raises:
        StrategyError: If there is no such step, the model is not compiled, the batch is not one,
            or this is not the main thread.
    """
    data = _checked(model, batch, step)
    with _scope(model, sessions) as session:
        if step != "predict":
            model._symbolic_build(data_batch=data)
        if session is not None and session.mesh.size > 1:
            agreement.check_model(model, [data], session)
        run = _Run(model, step, session)
        with _as_before(model, session), sessions.working(model):
            run(data, watch, sessions.sums)
        return run.explanation(sessions.entry.name)


@contextmanager
def _scope(model: Any, sessions: Sessions) -> Iterator[Session | None]:
    """The session of the model, and its scope: a sharded model may have outlived it."""
    with sessions.scope_of(model):
        session = sessions.current()
        with nullcontext() if session is None else session.strategy.scope():
            yield session


@attrs.define(eq=False)
class _Run:
    """A step that runs, and what was seen."""

    model: Any
    step: str
    session: Session | None
    calls: Calls = attrs.field(init=False)
    facts: list[tuple[Facts, Collective]] = attrs.field(factory=list, init=False)
    _in_batch: bool = attrs.field(default=True, init=False)

    def __call__(self, data: Any, watch: Watch, sums: MetricSums) -> None:
        """Run the step eagerly, as `train_on_batch` and the like do."""
        variables = {v.path: v._value for v in agreement.variables_of(self.model)}
        witness = watch(self._saw, variables)
        self.calls = Calls(self.session, witness)
        with witness.watching(), self.calls.followed():
            if self.session is not None:
                (data,) = sample_weights.distribute([data], self.session)
            self._in_batch = False
            if self.step != "predict":
                self.model.reset_metrics()
            with sums.step():
                outputs = getattr(self.model, f"{self.step}_step")(data)
            if self.session is not None:
                with self.calls.because(Cause("returned")):
                    seams.map_tensors(self.session.strategy.whole, outputs)

    def _saw(self, seen: Seen) -> None:
        facts = self._facts_of(seen)
        collective = Collective(
            kind=seen.kind,
            phase=facts.phase,
            layer=facts.layer,
            operator=facts.operator,
            axes=facts.axes,
            ranks=len(seen.processes),
            operand_bytes=seen.operand_bytes,
            sent_bytes=sent_bytes(seen.kind, seen.operand_bytes, len(seen.processes)),
            variables=facts.reduced or ((facts.variable,) if facts.variable else ()),
            shape=facts.shape,
            change=facts.change,
            reason=reason(facts),
        )
        self.facts.append((facts, collective))

    def _facts_of(self, seen: Seen) -> Facts:
        session, move = self.session, seen.move  # a step of the user's own may communicate without
        axes: tuple[str, ...] = ()
        if session is not None:
            axes = axes_of(session.mesh, session.world.processes, seen.processes)
        return Facts(
            kind=seen.kind,
            phase=self._phase(seen),
            axes=axes,
            layer=seen.layer or self.calls.owner(seen.reduced),
            operator=seen.operator or "",
            fell_back=seen.fell_back,
            shape=None if move is None else move.shape,
            source=None if move is None else move.source,
            target=None if move is None else move.target,
            variable=seen.variable,
            reduced=seen.reduced,
            cause=self.calls.cause,
            batch_axis="" if session is None else session.batch_axis,
        )

    def _phase(self, seen: Seen) -> Phase:
        if self._in_batch:
            return "batch"
        if seen.backward:
            return "backward"
        if seams.is_made_by_optimizer():
            return "update"
        return "forward" if seen.layer else "loss and metrics"

    def explanation(self, strategy: str) -> Explanation:
        """What was seen."""
        layers, session = self.calls.layers(), self.session
        return Explanation(
            model=self.model.name,
            step=self.step,
            mesh=None if session is None else session.mesh,
            strategy=strategy if session else "",
            rank=session.world.position if session else 0,
            layers=layers,
            collectives=counted(collective for _, collective in self.facts),
            avoidable=advise(self.facts, layers),
        )


def _checked(model: Any, batch: Any, step: str) -> Any:
    """The batch as the step takes it: `(x, y, sample_weight)`, or `(x,)`."""
    if step not in seams.STEPS:
        raise StrategyError(f"explain() has the steps {seams.STEPS}, got {step!r}.")
    if not hasattr(model, "train_step"):
        raise StrategyError(f"explain() takes a Keras model, got {type(model).__name__}.")
    if step != "predict" and not model.compiled:
        raise StrategyError(
            f"A {step} step of model {model.name!r} was to be explained, but it is not compiled: "
            'call model.compile(optimizer, loss) first, or explain(model, x, step="predict").'
        )
    if threading.current_thread() is not threading.main_thread():
        raise StrategyError(
            "explain() runs a step, whose collectives all ranks start in one order, and was called "
            f"on thread {threading.current_thread().name!r}: call it on the main thread."
        )
    if step == "predict":
        data = batch if isinstance(batch, tuple) else (batch,)
        return _same_rows(data[:1], "x")
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise StrategyError(
            f"A {step} step takes (x, y) or (x, y, sample_weight), the global batch, got "
            f"{_described(batch)}."
        )
    return _same_rows((*batch, None)[:3], "(x, y, sample_weight)")


def _same_rows(data: tuple[Any, ...], expected: str) -> tuple[Any, ...]:
    leaves = [leaf for leaf in seams.leaves(data) if leaf is not None]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    rows = {shape[0] for shape in shapes if shape}
    if not leaves or data[0] is None or any(not shape for shape in shapes) or len(rows) != 1:
        raise StrategyError(
            f"explain() takes one batch, {expected}, of arrays or tensors with as many rows each, "
            f"got {_described(data)}."
        )
    return data


def _described(batch: Any) -> str:
    if isinstance(batch, Iterable) and not hasattr(batch, "shape"):
        return agreement.shapes(batch)
    return f"{type(batch).__name__} of shape {tuple(getattr(batch, 'shape', ()))}"


@contextmanager
def _as_before(model: Any, session: Session | None) -> Iterator[None]:
    """After it variables, gradients, buffers and generators are as they were, to the last bit."""
    variables = list(agreement.variables_of(model))
    seed = seams.global_seed()
    tensors = [each._value for each in [*variables, *([] if seed is None else [seed])]]
    tensors += torch_modules.buffers(model)
    kept = [each.detach().clone() for each in tensors]
    gradients = [(each, each.grad) for each in tensors if each.requires_grad]
    for tensor, _ in gradients:
        tensor.grad = None
    devices = sorted({each.device.index or 0 for each in tensors if each.device.type == "cuda"})
    try:
        with seams.generators_kept(devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                if session is not None and session.strategy.owns(tensor):
                    session.strategy.assign(tensor, value)
                else:
                    tensor.copy_(value)
        for tensor, gradient in gradients:
            tensor.grad = gradient
