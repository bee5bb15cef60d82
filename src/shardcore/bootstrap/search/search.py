"""The search of policy `auto`: prices meshes and policies by traces of the model's step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from shardcore.bootstrap import planning
from shardcore.bootstrap.search.by_layer import search_by_layer
from shardcore.bootstrap.search.repeats import Repeats, trace_steps, verify_repeats
from shardcore.bootstrap.search.traces import PlannedCandidate, TraceRequest
from shardcore.domain.errors import PolicyError
from shardcore.domain.machines.machine import Machine
from shardcore.domain.steps.cost import cost_of
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
    groups_by_trace: dict[Any, list[PlannedCandidate]] = {}
    repeats = Repeats.of(facts)
    short, times = repeats.short, repeats.times
    for candidate in candidates(devices, machine.devices):
        planned = plan_candidate(candidate, request.rows, machine, short, times)
        if isinstance(planned, PassedOver):
            passed_over.append(planned)
        else:
            rules = tuple((rule.key, rule.spec) for rule in planned.plan.rules)
            groups_by_trace.setdefault((candidate.small, candidate.batch_parts, rules), []).append(
                planned
            )
    priced: list[Priced] = []
    groups = list(groups_by_trace.values())
    repeats = verify_repeats(repeats, (group[0] for group in reversed(groups)), request, machine)
    steps = trace_steps(groups, request, machine, repeats)
    for group, of_group in zip(groups, steps, strict=True):
        for layout, step in zip(group, of_group, strict=True):
            policy, mesh = layout.candidate.policy, layout.candidate.mesh
            cost = cost_of(step, machine)
            if cost.peak > machine.memory:
                passed_over.append(PassedOver(policy, mesh, MEMORY, cost.peak))
            else:
                priced.append(Priced(policy, mesh, cost, layout.candidate.options))
    priced += search_by_layer(priced, request, machine, repeats)
    priced.sort(key=lambda layout: layout.cost.seconds)
    return Ranking(request.rows, machine, tuple(priced), tuple(passed_over))


def plan_candidate(
    candidate: Candidate,
    rows: int,
    machine: Machine,
    facts: LayerFacts,
    times: Mapping[str, int] = MappingProxyType({}),
) -> PlannedCandidate | PassedOver:
    """Returns a candidate with the rules of its policy; or the reason why it needs no trace.

    `times` has, by path, the number of blocks for which a block of `facts` stands, if not for one.
    """
    out = PassedOver(candidate.policy, candidate.mesh, BATCH)
    if rows % candidate.batch_parts:
        return out
    try:
        planned = PlannedCandidate(
            candidate, planning.plan(candidate.policy, facts, candidate.mesh, candidate.options)
        )
    except PolicyError as error:
        return attrs.evolve(out, reason=str(error))
    least = _least_bytes(planned, facts, times)
    return planned if least <= machine.memory else attrs.evolve(out, reason=MEMORY, bytes=least)


def _least_bytes(planned: PlannedCandidate, facts: LayerFacts, times: Mapping[str, int]) -> int:
    """Returns the bytes of the variables and their gradients, which every step holds at once."""
    rules = planned.plan.by_path
    mesh = planned.candidate.mesh

    def held(layer: LayerFacts) -> int:
        size = 0
        for variable in layer.variables:
            match = rules.match(variable.path)
            here = variable.bytes if match is None else variable.bytes_here(match.value, mesh)
            size += 2 * here if variable.trainable else here
        return times.get(layer.path, 1) * (size + sum(map(held, layer.children)))

    return held(facts)
