"""Steps of a model under several layouts, each traced in a process that is forked for it.

This process can be forked: `bootstrap.cost.auto` has another one search where it cannot. One forked
process builds the model, without values and without a distribution. Of it a process is forked for
each layout (ADR 47): the first rank of simulated ranks, which lays the model out. The process
group, the names and the seeds of the caller stay as they are.

Both levels of forks are needed. To build the model again for each layout took two fifths of the
time, and to lay it out changes names, process groups and plans, which its process cannot undo.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from shardcore import bootstrap
from shardcore.bootstrap.ranks.launching import result_or_error
from shardcore.domain.cost.events import TracedStep
from shardcore.domain.cost.layers import layer_steps
from shardcore.domain.cost.machine import Machine
from shardcore.domain.cost.rank_step import RankStep, step_on
from shardcore.domain.cost.repeats import with_all_blocks
from shardcore.domain.cost.runs import Run
from shardcore.domain.errors import PolicyError, ShardcoreError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.candidates import Candidate
from shardcore.policies.rules import PlannedRules
from shardcore.ports.policy import LayerFacts
from shardcore.reporting.logs import log_of

if TYPE_CHECKING:
    from shardcore.adapters.cost.step_events import StepEvents
    from shardcore.binding.inspection.traced_step import RepeatedBlocks
    from shardcore.binding.inspection.without_values import BuiltModel

logger = log_of("plan")

# After so many seconds the progress is logged.
_PATIENCE = 2.0


@attrs.frozen(eq=False)
class TraceRequest:
    """The step that is traced.

    Args:
        build: Returns the compiled model.
        batch: A batch of any number of rows.
        rows: The rows of the global batch.
        groups: The group of each layer by its path: steps are divided among them too.
    """

    build: Callable[[], Any]
    batch: Any
    rows: int
    groups: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class PlannedCandidate:
    """A candidate with the rules of its policy."""

    candidate: Candidate
    plan: PlannedRules


@attrs.frozen
class Job:
    """The trace of a candidate, for one mesh or several with its rules.

    Args:
        planned: The candidate.
        meshes: The meshes.
        runs: Blocks of the model that repeat, some of which are traced.
        longer: The runs to which the trace is extended: all their blocks, by default.
    """

    planned: PlannedCandidate
    meshes: tuple[Mesh, ...]
    runs: tuple[Run, ...] = ()
    longer: tuple[Run, ...] | None = None


def steps(
    jobs: Sequence[Job], request: TraceRequest, machine: Machine, facts: LayerFacts
) -> list[tuple[RankStep, ...] | None]:
    """Traces the steps of each job on its meshes; None if blocks of its runs differ.

    Jobs that trace the same blocks share a model. Each core traces one job of a model at a time.

    Raises:
        PolicyError: If the model or its step fails without values, or this process has joined a
            job.
    """
    from shardcore.adapters.ranks.job import process_group

    if process_group.is_started():
        raise PolicyError(
            "Policy 'auto' traces steps in processes that are forked from this one, which has "
            "joined a job: call plan() before the first DeviceMesh, DataParallel or list_devices()."
        )
    by_runs: dict[tuple[Run, ...], list[Job]] = {}  # jobs that trace the same blocks
    for job in jobs:
        by_runs.setdefault(job.runs, []).append(job)
    groups = list(by_runs.values())
    results = _run_forked(
        lambda rank: _trace_on_model(groups[rank], request, machine, facts), len(groups)
    )
    left = dict(zip(by_runs, map(iter, results), strict=True))
    return [next(left[job.runs]) for job in jobs]


_JobSteps: TypeAlias = tuple[RankStep, ...] | None
_Result = TypeVar("_Result")


def _run_forked(work: Callable[[int], _Result], count: int) -> list[_Result]:
    """Runs `work` in processes that are forked for it; raises its first error."""
    from shardcore.adapters.ranks.job import forked_ranks
    from shardcore.adapters.ranks.job.started_ranks import Case

    # The rules of a plan name layers as the next model of this process will.
    case = Case(partial(result_or_error, work), (), keeps_session=True)
    values: list[_Result] = []
    for result in forked_ranks.run(case, count):
        if isinstance(result, ShardcoreError):
            raise result
        values.append(result)
    return values


def _trace_on_model(
    jobs: Sequence[Job], request: TraceRequest, machine: Machine, facts: LayerFacts
) -> list[_JobSteps]:
    """Traces jobs with the same blocks, which share a model."""
    from shardcore.adapters.ranks.job import cores

    reinstall({})
    model = _Model.of(jobs, request, machine, facts)
    results: list[_JobSteps] = []
    while len(results) < len(jobs):
        some = jobs[len(results) :][: cores.available()]
        if results and time.monotonic() > model.built_at + _PATIENCE:
            logger.info("policy 'auto' traces layout %d of %d", len(results) + 1, len(jobs))
        results += _run_forked(partial(model.steps, some), len(some))
    return results


@attrs.frozen(eq=False)
class _Model:
    """A model without values. A process that is forked from this one traces its step.

    Args:
        built: The model.
        events: Opens the context in which it was built; records the step.
        blocks: Its blocks.
        request: The step.
        machine: The machine.
        facts: The facts of the whole model.
        built_at: When it was built.
    """

    built: "BuiltModel"
    events: "StepEvents"
    blocks: "RepeatedBlocks"
    request: TraceRequest
    machine: Machine
    facts: LayerFacts
    built_at: float = attrs.field(factory=time.monotonic, init=False)

    @classmethod
    def of(
        cls, jobs: Sequence[Job], request: TraceRequest, machine: Machine, facts: LayerFacts
    ) -> "_Model":
        """Builds, without values, the model that jobs share."""
        from shardcore.adapters.cost.step_events import StepEvents
        from shardcore.binding.inspection.traced_step import RepeatedBlocks, build_to_trace

        names = {layer.path: layer.name for layer in facts.layers()}
        left_out = {path for run in jobs[0].runs for path in run.copied}
        traced = {path for run in jobs[0].runs for path in run.traced} | set(request.groups)
        blocks = RepeatedBlocks(
            frozenset(names[path] for path in traced - left_out),
            frozenset(names[path] for path in left_out),
        )
        events = StepEvents()
        built = build_to_trace(request.build, request.batch, events, blocks)
        return cls(built, events, blocks, request, machine, facts)

    def steps(self, jobs: Sequence[Job], number: int) -> _JobSteps:
        """Traces the step of a job, and extends it to its meshes."""
        job = jobs[number]
        step: TracedStep | None = self._trace(job.planned)
        for run in job.runs if job.longer is None else job.longer:
            step = None if step is None else with_all_blocks(step, run)
        return None if step is None else tuple(self._rank_step(mesh, step) for mesh in job.meshes)

    def _rank_step(self, mesh: Mesh, step: TracedStep) -> RankStep:
        groups = self.request.groups
        parts = layer_steps(step, groups) if groups else {}
        layers = {group: step_on(mesh, part) for group, part in parts.items()}
        return attrs.evolve(step_on(mesh, step), layers=layers)

    def _trace(self, planned: PlannedCandidate) -> TracedStep:
        """Traces a step on a small mesh, without the copied blocks."""
        from shardcore.adapters.inspection import StepTracer
        from shardcore.binding.cost.plan import plan_of
        from shardcore.binding.inspection.traced_step import trace_step

        candidate = planned.candidate
        mesh = candidate.small
        rows = self.request.rows // candidate.batch_parts * mesh.size_along(candidate.batch_axes)
        reinstall({"links": self.machine.links(candidate.mesh)})
        bootstrap.simulate(mesh.size)
        plan_of(self.facts, mesh, candidate.policy, planned.plan).distribute()
        sessions = bootstrap.installation().binding.sessions
        collectives = partial(StepTracer, values=False)
        return trace_step(self.built, rows, sessions, self.events, collectives, self.blocks)


def reinstall(options: Mapping[str, object]) -> None:
    """Installs the strategy that is installed once more, or the best one, with `options` too."""
    strategy, before = "auto", dict[str, Any]()
    if bootstrap.is_installed():
        strategy, before = bootstrap.installation().entry.name, bootstrap.installation().options
        bootstrap.uninstall()
    bootstrap.install(strategy, {**before, **options})
