"""Steps of a model under several layouts, each traced in a process that is forked for it.

A process is the first rank of simulated ranks: the process group, the names and the seeds of the
caller stay as they are.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs

from shardcore import bootstrap
from shardcore.domain.errors import PolicyError, ShardcoreError
from shardcore.domain.machines.machine import Machine
from shardcore.domain.mesh import Mesh
from shardcore.domain.steps.events import TracedStep
from shardcore.domain.steps.larger_mesh import RankStep, step_on
from shardcore.domain.steps.repeats import lengthened
from shardcore.domain.steps.runs import Run
from shardcore.policies.candidates import Candidate
from shardcore.policies.rules import Planned
from shardcore.ports.model import LayerFacts

logger = logging.getLogger("shardcore.plan")

# After so many seconds the progress is logged.
_PATIENCE = 2.0


@attrs.frozen(eq=False)
class TraceRequest:
    """The step that is traced.

    Args:
        build: Returns the compiled model.
        batch: A batch of any number of rows.
        rows: The rows of the global batch.
    """

    build: Callable[[], Any]
    batch: Any
    rows: int


@attrs.frozen
class PlannedCandidate:
    """A candidate with the rules of its policy."""

    candidate: Candidate
    plan: Planned


@attrs.frozen
class Job:
    """The trace of a candidate, for one mesh or several with its rules.

    Args:
        planned: The candidate.
        meshes: The meshes.
        runs: Blocks of the model that repeat, some of which are traced.
        longer: The runs to which the trace is lengthened: all their blocks, by default.
    """

    planned: PlannedCandidate
    meshes: tuple[Mesh, ...]
    runs: tuple[Run, ...] = ()
    longer: tuple[Run, ...] | None = None


def steps(
    jobs: Sequence[Job], request: TraceRequest, machine: Machine, facts: LayerFacts
) -> list[tuple[RankStep, ...] | None]:
    """Returns the steps of each job on its meshes; None if blocks of its runs differ.

    As many are traced at a time as there are cores.

    Raises:
        PolicyError: If the model or its step fails without values, or this process cannot be
            forked for it.
    """
    from shardcore.adapters.job import cores, forked_ranks, process_group

    if process_group.is_started():
        raise PolicyError(
            "Policy 'auto' traces steps in processes that are forked from this one, which has "
            "joined a job: call plan() before the first DeviceMesh, DataParallel or list_devices()."
        )
    forked_ranks.check_device("plan(policy='auto')")
    at_a_time, began = cores.available(), time.monotonic()
    found: list[tuple[RankStep, ...] | None] = []
    for start in range(0, len(jobs), at_a_time):
        some = jobs[start : start + at_a_time]

        def work(rank: int, some: Sequence[Job] = some) -> _Found:
            return _steps(some[rank], request, machine, facts)

        # The rules of a plan name layers as the next model of this process will.
        case = forked_ranks.Case(work, (), None, init=False, keeps_session=True)
        for each in forked_ranks.run(case, len(some)):
            if isinstance(each, ShardcoreError):
                raise each
            found.append(each)
        if len(found) < len(jobs) and time.monotonic() > began + _PATIENCE:
            logger.info("policy 'auto' has traced %d of %d layouts", len(found), len(jobs))
    return found


_Found: TypeAlias = tuple[RankStep, ...] | ShardcoreError | None


def _steps(job: Job, request: TraceRequest, machine: Machine, facts: LayerFacts) -> _Found:
    """Returns the steps of a job, or the error in its trace."""
    step: TracedStep | None
    try:
        step = _trace(job, request, machine, facts)
    except ShardcoreError as error:
        return error
    for run in job.runs if job.longer is None else job.longer:
        step = None if step is None else lengthened(step, run)
    return None if step is None else tuple(step_on(mesh, step) for mesh in job.meshes)


def _trace(job: Job, request: TraceRequest, machine: Machine, facts: LayerFacts) -> TracedStep:
    """Returns the trace of a step on a small mesh, without the copied blocks."""
    from shardcore.adapters.measurement.step_tape import StepTape
    from shardcore.adapters.measurement.traffic import StepTracer
    from shardcore.binding.inspection.traced_step import Blocks, trace_step
    from shardcore.binding.planning.make_plan import plan_of

    candidate = job.planned.candidate
    mesh = candidate.small
    rows = request.rows // candidate.batch_parts * mesh.size_along(candidate.batch_axes)
    install_again({"links": machine.links(candidate.mesh)})
    bootstrap.simulate(mesh.size)
    plan_of(facts, mesh, candidate.policy, job.planned.plan).distribute()
    sessions = bootstrap.installation().binding.sessions
    names = {layer.path: layer.name for layer in facts.layers()}
    blocks = Blocks(
        frozenset(names[path] for run in job.runs for path in run.traced),
        frozenset(names[path] for run in job.runs for path in run.copied),
    )
    collectives = partial(StepTracer, values=False)
    batch = request.batch
    return trace_step(request.build, batch, rows, sessions, StepTape(), collectives, blocks)


def install_again(options: Mapping[str, Any]) -> None:
    """Installs the strategy that is installed once more, or the best one, with `options` too."""
    strategy, before = "auto", dict[str, Any]()
    if bootstrap.is_installed():
        strategy, before = bootstrap.installation().entry.name, bootstrap.installation().options
        bootstrap.uninstall()
    bootstrap.install(strategy, {**before, **options})
