"""The search of policy `auto`: prices meshes and policies by traces of the model's step."""

from typing import Any

import attrs

from shardcore.bootstrap import planning
from shardcore.bootstrap.traces import PlannedCandidate, TraceRequest, traces
from shardcore.domain.errors import PolicyError
from shardcore.domain.machine import Machine
from shardcore.domain.paths.rules import PathRules
from shardcore.domain.step_cost import cost_of
from shardcore.policies.candidates import Candidate, candidates
from shardcore.ports.model import LayerFacts
from shardcore.reporting.ranking import BATCH, MEMORY, PassedOver, Priced, Ranking


def search(request: TraceRequest, devices: int, machine: Machine, facts: LayerFacts) -> Ranking:
    """Returns the candidates that fit, the fastest first, and the others with the reason.

    Args:
        request: The model and the batch.
        devices: The number of devices.
        machine: The machine; a device has its memory.
        facts: The facts of the model.

    Raises:
        PolicyError: If the model or its step fails without values.
    """
    passed_over: list[PassedOver] = []
    alike: dict[Any, list[PlannedCandidate]] = {}
    for candidate in candidates(devices, machine.devices):
        found = with_rules(candidate, request.rows, machine, facts)
        if isinstance(found, PassedOver):
            passed_over.append(found)
        else:
            rules = tuple((each.key, each.spec) for each in found.plan.rules)
            alike.setdefault((candidate.small, candidate.batch_parts, rules), []).append(found)
    priced: list[Priced] = []
    steps = traces([group[0] for group in alike.values()], request, machine, facts)
    for group, step in zip(alike.values(), steps, strict=True):
        for each in group:
            policy, mesh = each.candidate.policy, each.candidate.mesh
            cost = cost_of(step.on(mesh), machine)
            if cost.peak > machine.memory:
                passed_over.append(PassedOver(policy, mesh, MEMORY, cost.peak))
            else:
                priced.append(Priced(policy, mesh, cost))
    priced.sort(key=lambda each: each.cost.seconds)
    return Ranking(request.rows, machine, tuple(priced), tuple(passed_over))


def with_rules(
    candidate: Candidate, rows: int, machine: Machine, facts: LayerFacts
) -> PlannedCandidate | PassedOver:
    """Returns a candidate with the rules of its policy; or the reason why it needs no trace."""
    out = PassedOver(candidate.policy, candidate.mesh, BATCH)
    if rows % candidate.batch_parts:
        return out
    try:
        planned = PlannedCandidate(
            candidate, planning.plan(candidate.policy, facts, candidate.mesh, {})
        )
    except PolicyError as error:
        return attrs.evolve(out, reason=str(error))
    least = _least(planned, facts)
    return planned if least <= machine.memory else attrs.evolve(out, reason=MEMORY, bytes=least)


def _least(planned: PlannedCandidate, facts: LayerFacts) -> int:
    """Returns the bytes of the variables and their gradients, which every step holds at once."""
    rules = PathRules({each.key: each.spec for each in planned.plan.rules})
    mesh, least = planned.candidate.mesh, 0
    for variable in facts.all_variables():
        match = rules.match(variable.path)
        here = variable.bytes if match is None else variable.bytes_here(rules[match.key], mesh)
        least += 2 * here if variable.trainable else here
    return least
