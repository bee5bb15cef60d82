"""The function behind `shardcore.explain()`: runs one step of a model, and restores its state."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch
from keras import Model

from shardcore.binding import keras_private, torch_modules
from shardcore.binding.cost.plan import Plan
from shardcore.binding.engine import adoption
from shardcore.binding.inspection.explained_step import ExplainedStep
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.cost.collectives import merge_equal
from shardcore.domain.errors import ArgumentProblem, CallProblem
from shardcore.domain.inspection import advise
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.variable_size import VariableSize
from shardcore.ports.measurement import TracerFactory
from shardcore.reporting.cost.plan import PlanReport, plan_report
from shardcore.reporting.inspection.explanation import Explanation

# The steps of a trainer.
STEPS = ("train", "test", "predict")
# The batches of train and test steps, by the fewest parts that they may have.
EXPECTED = {1: "x, (x, y) or (x, y, sample_weight)", 2: "(x, y) or (x, y, sample_weight)"}


def explain_model(
    model: Model, batch: object, step: str, sessions: Sessions, trace: TracerFactory
) -> Explanation:
    """Runs one step of `model`, which stays as it is, and notes collectives. A collective."""
    data = checked_batch(model, batch, step)
    # A sharded model may outlive the scope in which it was built.
    with sessions.scope_of(model), ExitStack() as scope:
        session = sessions.current()
        if session is not None:
            session.processes.barrier(f"explain() of model {model.name!r}")
            scope.enter_context(session.strategy.implicit_replication())
        if step != "predict":
            keras_private.build_by(model, data)
        if session is not None:
            adoption.adopt(model, session)
        if session is not None and session.mesh.size > 1:
            rank_consistency.check_model(model, [data], session)
        run = ExplainedStep(model, step, session)
        with _as_before(model, session), sessions.working(model):
            run.run(data, trace, sessions.sums)
        layers = run.layers()
    return Explanation(
        model=model.name,
        step=step,
        mesh=None if session is None else session.mesh,
        strategy=sessions.entry.name if session else "",
        rank=session.world.position if session else 0,
        layers=layers,
        collectives=merge_equal(fact.collective() for fact in run.facts),
        avoidable=advise(run.facts, layers),
        layouts=None if session is None else _layouts(model, session),
    )


def _layouts(model: Model, session: Session) -> PlanReport:
    layout_map = keras_private.layout_map_of(session.distribution)
    if isinstance(layout_map, Plan):
        return layout_map.report()
    specs = {} if layout_map is None else keras_private.entries_of(layout_map)
    rules = PathRules({key: layout.axes for key, layout in specs.items()})
    variables = [
        VariableSize(variable.path, tuple(variable.shape), tensor_of(variable).element_size())
        for variable in model.variables
    ]
    outputs, reasons = sorted(session.output_paths), dict.fromkeys(rules, "a rule of the program")
    return plan_report("", session.mesh, variables, outputs, rules, reasons)


def checked_batch(model: Model, batch: object, step: str) -> Any:
    """Checks a batch; returns it as `fit` gives it to a step: `x`, `(x, y)`, or with weights.

    To predict, it is `(x,)`.
    """
    if step not in STEPS:
        raise ArgumentProblem(name="explain(step)", expected=f"one of {STEPS}", got=repr(step))
    if not hasattr(model, "train_step"):
        got = type(model).__name__
        raise ArgumentProblem(name="explain(model)", expected="a Keras model", got=got)
    if step != "predict" and not model.compiled:
        raise CallProblem(
            f"A {step} step of model {model.name!r} was to run, but it is not compiled: "
            'call model.compile(optimizer, loss) first, or explain(model, x, step="predict").',
            name=model.name,
        )
    if threading.current_thread() is not threading.main_thread():
        raise CallProblem(
            "explain() runs a step, whose collectives all ranks start in one order, and was called "
            f"on thread {threading.current_thread().name!r}: call it on the main thread.",
            name=threading.current_thread().name,
        )
    if step == "predict":
        data = batch if isinstance(batch, tuple) else (batch,)
        return _same_rows(data[:1], "x")
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    least = 2 if _needs_targets(model, step) else 1
    if not least <= len(parts) <= 3:
        raise ArgumentProblem(
            name=f"explain(batch) of a {step} step",
            expected=f"{EXPECTED[least]}, the global batch",
            got=_describe(batch),
        )
    return keras.utils.pack_x_y_sample_weight(*_same_rows(parts, "(x, y, sample_weight)"))


def _needs_targets(model: Model, step: str) -> bool:
    """Tells whether Keras' own step compares targets with the outputs of the model."""
    return model.loss is not None and not keras_private.is_own_step(model, f"{step}_step")


def _same_rows(data: tuple[object, ...], expected: str) -> tuple[Any, ...]:
    leaves = [leaf for leaf in keras_private.leaves(data) if leaf is not None]
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    rows = {shape[0] for shape in shapes if shape}
    if not leaves or data[0] is None or any(not shape for shape in shapes) or len(rows) != 1:
        raise ArgumentProblem(
            name="explain(batch)",
            expected=f"{expected}, arrays or tensors with as many rows each",
            got=_describe(data),
        )
    return data


def _describe(batch: object) -> str:
    if isinstance(batch, Iterable) and not hasattr(batch, "shape"):
        return rank_consistency.shapes(batch)
    return f"{type(batch).__name__} of shape {tuple(getattr(batch, 'shape', ()))}"


@contextmanager
def _as_before(model: Model, session: Session | None) -> Iterator[None]:
    """Restores variables, gradients, buffers and generators at the end, bitwise."""
    variables = list(rank_consistency.variables_of(model))
    seed = keras_private.global_seed()
    tensors = [tensor_of(variable) for variable in [*variables, *([] if seed is None else [seed])]]
    tensors += torch_modules.buffers(model)
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.requires_grad]
    for tensor, _ in gradients:
        tensor.grad = None
    devices = sorted(
        {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    )
    try:
        with keras_private.restored_generators(devices):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if session is not None and session.strategy.owns(tensor):
                    session.strategy.assign(tensor, value)
                else:
                    tensor.copy_(value)
        for tensor, gradient in gradients:
            tensor.grad = gradient
