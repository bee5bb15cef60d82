"""The steps of a case captured, beside the same steps run eagerly: one result?

Both run on each rank, one after the other. What a captured step computes is compared with what the
eager one does on the same mesh: how far that is from one device is the subject of `parity`. What
Inductor compiled may differ by rounding, as by each of many updates.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
from attrs import define, field, frozen

import shardcore
from shardcore.binding.capture import step as captured_step
from tests.matrix import parity, strategies
from tests.matrix.forks import run_all
from tests.matrix.outcomes import Outcome
from tests.matrix.parity import Case, Mesh

# Of each function so many steps are run from a trace, and so many at most in all: some are
# recorded twice for each of several ways that they go.
REPLAYS = 3
MOST_STEPS = 24
# Over several ranks: what is summed and multiplied in a bucket begins elsewhere than by itself.
LAST_BITS = 1e-5
# What Inductor compiled, after several steps.
ROUNDED = 1e-4
# Seconds for one item that Inductor compiles: it takes several for each step, a minute for some.
TO_COMPILE = 900
Shapes = dict[str, tuple[int, ...]]


@frozen
class Run:
    """The results of the steps of a case.

    Args:
        values: arrays by name: logs and predictions of every step, variables after the last.
        steps: how many there were of each function.
    """

    values: dict[str, np.ndarray] = field(repr=False)
    steps: dict[str, int]


@define
class Observed:
    """Counts of captured steps, and the reasons of eager ones.

    Args:
        replayed: how many ran from a trace.
        reasons: why others were not captured.
    """

    replayed: int = 0
    reasons: list[str] = field(factory=list)


# What is done with the model of a case, compiled with a `jit_compile`; if the numbers of steps are
# given, so many.
JitCompile = bool | Literal["auto"]
Steps = Callable[[Case, Observed, JitCompile, dict[str, int] | None], Run]


class _Warnings(logging.Handler):
    def __init__(self, observed: Observed) -> None:
        super().__init__(logging.WARNING)
        self.observed = observed

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        _, _, reason = text.partition("with the same numbers: ")
        reason, *_ = (reason or text).partition(". To silence this")
        self.observed.reasons.append(reason.partition(", in layer ")[0])  # the case names it


def watch() -> Observed:
    """Observes the steps of this process from now on."""
    observed = Observed()
    ran = captured_step.CacheEntry.note_run

    def noted(attempt: Any, program: Any) -> None:
        observed.replayed += 1
        ran(attempt, program)

    captured_step.CacheEntry.note_run = noted
    logger = logging.getLogger("shardcore.capture")
    logger.addHandler(_Warnings(observed))
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    return observed


def beside_eager(
    cases: dict[str, Case],
    mesh: Mesh | None,
    shapes: dict[str, Shapes],
    steps: Steps,
    jit_compile: JitCompile,
) -> dict[str, Outcome]:
    """The outcome of each case: its captured steps, compared with its eager ones.

    Args:
        cases: by name.
        mesh: None for one device, under the strategy `single`.
        shapes: of the variables that the mesh may shard, by case and path.
        steps: what is done with the model of a case.
        jit_compile: what captures its steps: "auto", or True for Inductor.
    """
    ranks = 1 if mesh is None else mesh.ranks

    def start(rank: int) -> Callable[[Case], Outcome]:
        shardcore.install("single" if mesh is None else strategies.name())
        observed = watch()
        return lambda case: _compared(case, mesh, shapes[case.name], observed, steps, jit_compile)

    seconds = TO_COMPILE if jit_compile is True else None
    found = run_all(cases, ranks, start, lambda outcome: outcome.status == "error", seconds)
    return {name: parity.of_ranks(result) for name, result in found.items()}


def _compared(
    case: Case,
    mesh: Mesh | None,
    shapes: Shapes,
    observed: Observed,
    steps: Steps,
    jit_compile: JitCompile,
) -> Outcome:
    observed.reasons.clear()
    before = observed.replayed
    try:
        _begin(mesh, shapes)
        captured = steps(case, observed, jit_compile, None)
        replayed = observed.replayed
        _begin(mesh, shapes)
        eager = steps(case, observed, False, captured.steps)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its outcome
        return Outcome("error", parity.story(error))
    finally:
        keras.distribution.set_distribution(None)
    assert observed.replayed == replayed, f"asked to run eagerly, {case.name} did not"
    if found := difference(captured.values, eager.values, _tolerance(case, mesh, jit_compile)):
        return Outcome("WRONG", found)
    if observed.reasons:
        return Outcome("eager", "; ".join(dict.fromkeys(observed.reasons)))
    silent = [name for name, count in captured.steps.items() if count == MOST_STEPS]
    if silent or replayed == before:
        which = ", ".join(silent) or "any step"
        return Outcome("error", f"no captured step of {which}, and nothing says why")
    return Outcome("ok")


def _tolerance(case: Case, mesh: Mesh | None, jit_compile: JitCompile) -> float:
    if jit_compile is True:
        return max(ROUNDED, case.tolerance)  # in half precision it rounds less often
    return 0.0 if mesh is None else LAST_BITS


def _begin(mesh: Mesh | None, shapes: Shapes) -> None:
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    if mesh is not None:
        parity.distribute(mesh, shapes)


def run(
    case: Case, observed: Observed, jit_compile: JitCompile, numbers: dict[str, int] | None = None
) -> Run:
    """Training steps with other batches of the same shape, then evaluations and predictions.

    Args:
        case: the model and its data.
        observed: what is done with its steps.
        jit_compile: what the model is compiled with.
        numbers: how many steps of each function there are; if None, all that it takes to run some
            from a trace.
    """
    keras.utils.set_random_seed(7)
    generator = np.random.default_rng(11)
    model = case.build()
    apply_jit_compile(model, jit_compile, observed)
    rows = case.rows[0]
    values: dict[str, np.ndarray] = {}
    steps: dict[str, int] = {}

    def several(name: str, step: Callable[..., Any]) -> None:
        enough, said = observed.replayed + REPLAYS, len(observed.reasons)
        for number in range(MOST_STEPS if numbers is None else numbers[name]):
            steps[name] = number + 1
            found = step(*case.batch(generator, rows))
            for leaf, value in enumerate(keras.tree.flatten(found)):
                values[f"{name} {number}: {leaf}"] = np.asarray(value)
            if observed.replayed == enough or len(observed.reasons) > said:
                break

    several("train_step", lambda *batch: model.train_on_batch(*batch, return_dict=True))
    if case.batch(generator, rows)[1] is not None:
        several("test_step", lambda *batch: model.test_on_batch(*batch, return_dict=True))
    several("predict_step", lambda x, *_: model.predict_on_batch(x))
    for variable in [*model.variables, *model.optimizer.variables]:
        values[variable.path] = np.asarray(keras.ops.convert_to_numpy(variable))
    return Run(values, steps)


def run_own(
    case: Case, observed: Observed, jit_compile: JitCompile, numbers: dict[str, int] | None = None
) -> Run:
    """The same with a `train_step` that the user has written, captured as if it were Keras' own.

    `compile` captures such a step for Inductor alone, which rounds.
    """
    asked = captured_step.keras_private.is_own_step
    captured_step.keras_private.is_own_step = lambda trainer, name: False
    try:
        return run(case, observed, jit_compile, numbers)
    finally:
        captured_step.keras_private.is_own_step = asked


def apply_jit_compile(model: Any, jit_compile: JitCompile, observed: Observed) -> None:
    """For a model that was compiled with "auto"."""
    if jit_compile != "auto":
        model.jit_compile = jit_compile
    if jit_compile is True and not model.jit_compile:
        observed.reasons.append("Keras takes `jit_compile=True` back, with a warning")


def difference(
    captured: dict[str, np.ndarray], eager: dict[str, np.ndarray], tolerance: float
) -> str:
    """Describes the first difference: of any bit, or above a tolerance; "" if equal."""
    if found := parity.compare(captured, eager, tolerance):
        return found
    if tolerance:
        return ""
    unlike = (name for name in eager if captured[name].tobytes() != eager[name].tobytes())
    return next((f"{name}: other bits" for name in unlike), "")
