"""Runs programs on one device and over their meshes, and compares the numbers."""

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import keras
import numpy as np
from keras.src.backend.common import dtypes

import shardcore
from shardcore.domain.errors import (
    AuditError,
    OtherRankFailed,
    RankFailed,
    RankMismatchError,
    ShardcoreError,
)
from tests.fuzz import events, models
from tests.fuzz.life import Life
from tests.fuzz.programs import Program
from tests.matrix import captured, parity
from tests.matrix.forks import Ended, run_all

# Relative to the largest number of an array. float32 is chaotic after some steps.
TOLERANCES = {"float64": 1e-7, "float32": 2e-3}
SECONDS = 120  # for a program: on a busy machine a rank may get no core for long
# Errors of shardcore that are no refusals: an audit, or ranks that part ways.
_DIFFERENCES = (AuditError, OtherRankFailed, RankFailed, RankMismatchError)
Shapes = dict[str, tuple[int, ...]]


@attrs.frozen
class Run:
    """The numbers of a program on one process, or its error.

    Args:
        numbers: Arrays by name.
        shapes: Of the variables of the model, by path.
        error: The error that ended it, if one did.
        is_refused: Whether the error is one of shardcore's, which says what it does not do.
        captured: How many steps ran from a trace.
    """

    numbers: dict[str, np.ndarray] = attrs.field(factory=dict, repr=False)
    shapes: Shapes = attrs.field(factory=dict, repr=False)
    error: str = ""
    is_refused: bool = False
    captured: int = 0


@attrs.frozen
class Verdict:
    """The outcome of a comparison.

    Args:
        kind: "passed", "refused", "rounded", or, if the program found something, "differed".
        why: The reason of the refusal, or the first difference.
        captured: How many steps ran from a trace.
    """

    kind: str
    why: str = ""
    captured: int = 0


def verdicts(programs: Iterable[Program]) -> dict[Program, Verdict]:
    """Returns the verdict of each program; one in float32 that differs is run in float64 too."""
    verdict_of = _compared(list(dict.fromkeys(programs)))
    in_float64 = {
        program: attrs.evolve(program, floatx="float64")
        for program, verdict in verdict_of.items()
        if program.floatx == "float32" and "differs by" in verdict.why
    }
    precise = _compared(list(in_float64.values()))
    for program, other in in_float64.items():
        if precise[other].kind == "passed":
            verdict_of[program] = attrs.evolve(verdict_of[program], kind="rounded")
    return verdict_of


def _compared(programs: list[Program]) -> dict[Program, Verdict]:
    names = {str(number): program for number, program in enumerate(programs)}
    verdict_of: dict[Program, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="shardcore-fuzz-") as folder:
        alone = _run(names, 1, {}, Path(folder) / "alone")
        for ranks in sorted({program.ranks for program in programs}):
            chosen = {name: program for name, program in names.items() if program.ranks == ranks}
            shapes = {name: alone[name][0].shapes for name in chosen}
            runs = _run(chosen, ranks, shapes, Path(folder) / str(ranks))
            for name, program in chosen.items():
                verdict_of[program] = verdict(program, alone[name][0], runs[name])
    return {program: verdict_of[program] for program in programs}


def _run(
    programs: dict[str, Program], ranks: int, shapes: dict[str, Shapes], folder: Path
) -> dict[str, list[Run]]:
    """Runs programs on ranks, and returns the run of each on every rank.

    Args:
        programs: By name.
        ranks: 1 for plain Keras.
        shapes: Of the variables, by name of the program; empty for plain Keras.
        folder: For the files of the programs.
    """

    def start(rank: int) -> Any:
        os.environ["TQDM_DISABLE"] = "1"
        observed = captured.watch()
        logging.getLogger().setLevel(logging.ERROR)

        def run_one(named: tuple[str, Program]) -> Run:
            name, program = named
            own = folder / name
            own.mkdir(parents=True, exist_ok=True)
            before = observed.replayed
            run = _attempted(program, shapes.get(name) if shapes else None, own)
            return attrs.evolve(run, captured=observed.replayed - before)

        return run_one

    named = {name: (name, program) for name, program in programs.items()}
    runs = run_all(named, ranks, start, lambda run: bool(run.error), SECONDS)
    return {name: _of_ranks(run, ranks) for name, run in runs.items()}


def _of_ranks(runs: "list[Run] | Ended", ranks: int) -> list[Run]:
    """Returns the runs of all ranks; if they parted ways, what each of them says."""
    if isinstance(runs, Ended):
        errors = " ".join(run.error for run in runs.noted)
        return [Run(error=f"the ranks ended: {errors} {runs.why}")] * ranks
    return runs


def _attempted(program: Program, shapes: Shapes | None, folder: Path) -> Run:
    """Runs a program on this process; over its mesh if the shapes of its variables are known."""
    numbers: dict[str, np.ndarray] = {}
    known: Shapes = {}
    try:
        keras.utils.clear_session()
        _set_floatx(program.floatx)
        if shapes is not None:
            os.environ["SHARDCORE_CAPTURE"] = "audit:2" if program.capture == "audit" else "at-once"
            shardcore.install(program.strategy)
            _distribute(program, shapes)
        keras.utils.set_random_seed(7)
        model = models.build(program)
        known = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
        models.compile_model(model, program, program.optimizer)
        life = Life(program, model, folder, shapes is not None, numbers=numbers)
        for event in program.events:
            events.meet(life, event)
        life.count += 1
        life.note(life.state, "the variables at the end")
    except Exception as error:  # noqa: BLE001 - whatever a program raises is compared
        is_refused = isinstance(error, ShardcoreError) and not isinstance(error, _DIFFERENCES)
        return Run(numbers, known, parity.story(error), is_refused)
    finally:
        if shapes is not None:
            keras.distribution.set_distribution(None)
            shardcore.uninstall()
    return Run(numbers, known)


def _set_floatx(floatx: str) -> None:
    """Sets the float type, in which Keras computes means and mixed operands too."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    # Keras promotes float64 to float32, as JAX does.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = floatx


def _distribute(program: Program, shapes: Shapes) -> None:
    data, model = program.mesh
    if model == 1 and set(program.layout) == {"replicated"}:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        return
    mesh = keras.distribution.DeviceMesh((data, model), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, spec in rules(program, shapes).items():
        layout_map[path] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def rules(program: Program, shapes: Shapes) -> dict[str, tuple[Any, ...]]:
    """Returns a spec for each variable that the layout of the program shards."""
    layouts = program.layout
    specs = {
        path: spec_of(layouts[number % len(layouts)], shape, program.ranks)
        for number, (path, shape) in enumerate(shapes.items())
    }
    return {path: spec for path, spec in specs.items() if any(spec)}


def spec_of(layout: str, shape: tuple[int, ...], ranks: int) -> tuple[Any, ...]:
    """Returns the spec of a layout for a variable of that shape."""
    dim, axes = {
        "replicated": (0, None),
        "last": (len(shape) - 1, "model"),
        "first": (0, "model"),
        "last over data": (len(shape) - 1, "data"),
        "first over both": (0, ("data", "model")),
        "middle": (len(shape) // 2, "model"),
    }[layout]
    if not shape or shape[dim] < ranks:
        return (None,) * len(shape)
    return tuple(axes if number == dim else None for number in range(len(shape)))


def verdict(program: Program, alone: Run, ranks: list[Run]) -> Verdict:
    """Compares what ranks computed with what one device did."""
    failed = next((run for run in ranks if run.error), None)
    if all(run.is_refused for run in ranks):
        return Verdict("refused", ranks[0].error)
    if failed is not None:
        if alone.error and not failed.error.startswith("the ranks ended"):
            return Verdict("refused", f"plain Keras too: {alone.error}")
        return Verdict("differed", failed.error)
    if alone.error:
        return Verdict("differed", f"plain Keras alone raises {alone.error}")
    for rank, run in enumerate(ranks):
        tolerance = TOLERANCES[program.floatx]
        if difference := parity.compare(run.numbers, alone.numbers, tolerance):
            return Verdict("differed", f"rank {rank}: {difference}")
    return Verdict("passed", captured=ranks[0].captured)
