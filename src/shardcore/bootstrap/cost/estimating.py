"""The memory of a train step under a plan, from a process that is started for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcore import bootstrap
from shardcore.bootstrap.cost.traces import reinstall
from shardcore.bootstrap.ranks import launching
from shardcore.domain.errors import PolicyError
from shardcore.reporting.cost.memory import MemoryReport

if TYPE_CHECKING:
    from shardcore.binding.cost.plan import Plan


def estimate_memory(plan: "Plan", build: Callable[[], object], batch: object) -> MemoryReport:
    """Returns the memory of a rank in a train step under `plan`.

    The process that runs it is the first rank of simulated ranks: the process group, the
    distribution, the names and the seeds of the caller stay as they are.

    Raises:
        PolicyError: If an argument is wrong, this process has joined a job, or the model or its
            step fails without values.
        ArgumentProblem: If the model or the batch is none.
        CallProblem: If the model is not compiled.
    """
    from shardcore.adapters.ranks.job import process_group

    if not hasattr(plan, "distribute"):
        raise PolicyError(f"Expected a plan of shardcore.plan(), got {plan!r}.", got=repr(plan))
    if hasattr(build, "variables") or not callable(build):
        raise PolicyError(
            "The model is built without values, under the plan: give the function that builds and "
            f"compiles it, got {build!r}.",
            got=repr(build),
        )
    if process_group.has_others():
        raise PolicyError(
            "The step runs in a process that this one starts, which has joined a job: "
            "estimate before the first DeviceMesh, DataParallel or list_devices(), with a plan "
            "over a shardcore.domain.layouts.mesh.Mesh."
        )
    # The rules of a plan name layers as the next model of this process will.
    return launching.run_separately("estimate_memory()", _simulate, plan, build, batch)


def _simulate(plan: "Plan", build: Callable[[], object], batch: object) -> MemoryReport:
    """Returns the memory in this process, which becomes a rank of simulated ones."""
    from shardcore.adapters.ranks.job import process_group

    reinstall({})
    if not process_group.is_started():
        bootstrap.simulate(plan.mesh.size)
    plan.distribute()
    return _estimate(build, batch, plan.policy)


def _estimate(build: Callable[[], object], batch: object, policy: str) -> MemoryReport:
    """Returns the memory under the distribution that is set."""
    from shardcore.adapters.cost.memory import StepMemory
    from shardcore.binding.inspection.without_values import estimate_memory

    sessions = bootstrap.installation().binding.sessions
    given = batch if callable(batch) else lambda: batch
    return estimate_memory(build, given, policy, sessions, StepMemory())
