"""Policy `auto`: the mesh and the policy with the shortest predicted step, among those that fit."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from shardcore import bootstrap
from shardcore.bootstrap import planning
from shardcore.bootstrap.cost import machines, search
from shardcore.bootstrap.cost.traces import TraceRequest
from shardcore.bootstrap.ranks import launching
from shardcore.domain.cost.machine import Machine
from shardcore.domain.errors import PolicyError
from shardcore.ports.policy import LayerFacts
from shardcore.ports.world import Processes
from shardcore.reporting.cost.ranking import Priced, Ranking

NAME = "auto"
DEFAULT_MACHINE = "h100"
OPTIONS = ("batch", "rows", "machine", "memory", "host")


def plan(model: object, mesh: object, devices: int | None, options: Mapping[str, Any]) -> Any:
    """Searches for the plan with the shortest predicted step; its `ranking` has the others.

    Raises:
        PolicyError: If an option is wrong, no layout fits, or the step fails without values.
        MachineError: If the machine is not known.
    """
    if mesh is not None or not _is_count(devices):
        raise PolicyError(
            "Policy 'auto' chooses the mesh too: give the number of devices, plan(build, "
            f"devices=8, policy='auto', batch=batch), got mesh={mesh!r}, devices={devices!r}.",
            name="plan(mesh)",
            got=repr(mesh),
        )
    build = _checked_builder(model, options)
    from shardcore.binding.cost.plan import facts_of, joined_mesh, plan_of
    from shardcore.binding.inspection.traced_step import rows_of

    assert devices is not None
    batch = options["batch"]() if callable(options["batch"]) else options["batch"]
    rows = options.get("rows") or rows_of(batch)
    installed = bootstrap.installation() if bootstrap.is_installed() else None
    facts = facts_of(build, None if installed is None else installed.binding.sessions)
    run = partial(_search, TraceRequest(build, batch, rows), devices, _machine(options), facts)
    is_here = installed is not None and installed.processes.launched == devices
    ranking = _search_on_rank_0(run, installed.processes) if installed and is_here else run()
    best = _best(ranking)
    planned = planning.plan(best.policy, facts, best.mesh, best.options)  # of all blocks
    chosen = plan_of(facts, joined_mesh(best.mesh) if is_here else best.mesh, best.policy, planned)
    chosen.ranking = ranking
    return chosen


def _search_on_rank_0(run: Callable[[], Ranking], processes: Processes) -> Ranking:
    """Searches on rank 0 and joins the job; all ranks get its ranking.

    Rank 0 joins after the search: from then on, that would take a new interpreter.

    Raises:
        Exception: What the search of rank 0 raises, on all ranks.
    """
    from shardcore.binding.cost.plan import join_job

    result: Ranking | Exception | None = None
    if bootstrap.rank() == 0:
        try:
            result = run()
        except Exception as error:  # noqa: BLE001 - the other ranks wait: it is raised on all
            result = error
    join_job()
    ranking = processes.gather(result, "plan(policy='auto')")[0]
    if isinstance(ranking, Exception):
        raise ranking
    assert ranking is not None
    return ranking


def _search(request: TraceRequest, devices: int, machine: Machine, facts: LayerFacts) -> Ranking:
    """Searches here, or in another process if one that is forked from this could not trace."""
    arguments = (request, devices, machine, facts)
    if launching.fork_can_trace():
        return search.search(*arguments)
    return launching.run_separately("plan(policy='auto')", search.search, *arguments)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _checked_builder(model: object, options: Mapping[str, object]) -> Callable[[], Any]:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise PolicyError(
            f"Policy 'auto' has no option {unknown[0]!r}; it has {OPTIONS}.", name=unknown[0]
        )
    if hasattr(model, "variables") or not callable(model):
        raise PolicyError(
            "Policy 'auto' traces steps of the model under many layouts: give the function that "
            f"builds and compiles it, got {model!r}.",
            got=repr(model),
        )
    if options.get("batch") is None:
        raise PolicyError(
            "Policy 'auto' traces a train step: give batch=, a batch as fit() has, with any number "
            "of rows, or a function that returns one; rows= has the rows of the global batch."
        )
    for name in ("rows", "host"):
        if options.get(name) is not None and not _is_count(options[name]):
            raise PolicyError(
                f"Option {name!r}: expected a number above 0, got {options[name]!r}.",
                name=name,
                got=repr(options[name]),
            )
    return model


def _machine(options: Mapping[str, Any]) -> Machine:
    """Chooses the machine of the options, or the one at hand, with their host and memory."""
    given = options.get("machine") or machines.here() or DEFAULT_MACHINE
    machine = given if isinstance(given, Machine) else machines.find(str(given))
    if options.get("host") is not None:
        machine = attrs.evolve(machine, devices=options["host"])
    if options.get("memory") is not None:
        machine = attrs.evolve(machine, memory=machines.bytes_of(options["memory"]))
    return machine


def _best(ranking: Ranking) -> Priced:
    if ranking.priced:
        return ranking.priced[0]
    raise PolicyError(f"No layout fits. {ranking.why_none()}")
