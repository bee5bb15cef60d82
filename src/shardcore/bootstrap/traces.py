"""Traces of a model's step under several layouts, each in a process that is forked for it.

A process is the first rank of simulated ranks: the process group, the names and the seeds of the
caller stay as they are.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from shardcore import bootstrap
from shardcore.domain.errors import PolicyError, ShardcoreError
from shardcore.domain.machine import Machine
from shardcore.domain.traced_step import TracedStep
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


def traces(
    planned: Sequence[PlannedCandidate], request: TraceRequest, machine: Machine, facts: LayerFacts
) -> list[TracedStep]:
    """Returns the trace of each, of as many at a time as there are cores.

    Raises:
        PolicyError: If the model or its step fails without values, or this process cannot be
            forked for it.
    """
    from shardcore.adapters import cores, forked_ranks, process_group

    if process_group.is_started():
        raise PolicyError(
            "Policy 'auto' traces steps in processes that are forked from this one, which has "
            "joined a job: call plan() before the first DeviceMesh, DataParallel or list_devices()."
        )
    forked_ranks.check_device("plan(policy='auto')")
    at_a_time, began = cores.available(), time.monotonic()
    found: list[TracedStep] = []
    for start in range(0, len(planned), at_a_time):
        some = planned[start : start + at_a_time]

        def work(rank: int, some: Sequence[PlannedCandidate] = some) -> TracedStep | ShardcoreError:
            return _trace(some[rank], request, machine, facts)

        # The rules of a plan name layers as the next model of this process will.
        case = forked_ranks.Case(work, (), None, init=False, keeps_session=True)
        for each in forked_ranks.run(case, len(some)):
            if isinstance(each, ShardcoreError):
                raise each
            found.append(each)
        if len(found) < len(planned) and time.monotonic() > began + _PATIENCE:
            logger.info("policy 'auto' has traced %d of %d layouts", len(found), len(planned))
    return found


def _trace(
    planned: PlannedCandidate, request: TraceRequest, machine: Machine, facts: LayerFacts
) -> TracedStep | ShardcoreError:
    """Returns the trace of a step on a small mesh, or the error in it."""
    from shardcore.adapters.memory import StepMemory
    from shardcore.adapters.step_work import StepWork
    from shardcore.adapters.traffic import StepTracer
    from shardcore.binding.inspection.traced_step import trace_step
    from shardcore.binding.planning.make_plan import plan_of

    candidate = planned.candidate
    mesh = candidate.small
    rows = request.rows // candidate.batch_parts * mesh.size_along(candidate.batch_axes)
    try:
        install_again({"links": machine.links(candidate.mesh)})
        bootstrap.simulate(mesh.size)
        plan_of(facts, mesh, candidate.policy, planned.plan).distribute()
        sessions = bootstrap.installation().binding.sessions
        watching = StepMemory(), StepWork(), partial(StepTracer, values=False)
        return trace_step(request.build, request.batch, rows, sessions, *watching)
    except ShardcoreError as error:
        return error


def install_again(options: Mapping[str, Any]) -> None:
    """Installs the strategy that is installed once more, or the best one, with `options` too."""
    strategy, before = "auto", dict[str, Any]()
    if bootstrap.is_installed():
        strategy, before = bootstrap.installation().entry.name, bootstrap.installation().options
        bootstrap.uninstall()
    bootstrap.install(strategy, {**before, **options})
