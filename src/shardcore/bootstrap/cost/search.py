"""The search of policy `auto`: prices meshes and policies by traces of the step (ADR 41)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import attrs

from shardcore.bootstrap import planning
from shardcore.bootstrap.cost.repeats import Repeats, specs_in, trace_steps, verify_repeats
from shardcore.bootstrap.cost.traces import PlannedCandidate, TraceRequest
from shardcore.domain.cost.layers import LayerCost, cheapest
from shardcore.domain.cost.machine import Machine
from shardcore.domain.cost.rank_step import RankStep, StepCost, cost_of
from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.candidates import Candidate, candidates
from shardcore.policies.per_layer import BATCH_NDIM, NAME, policies_on
from shardcore.policies.regions import layer_groups
from shardcore.policies.rules import idle_axes, shared_keys
from shardcore.ports.policy import LayerFacts
from shardcore.reporting.cost.ranking import BATCH, EQUAL, IDLE, MEMORY, PassedOver, Priced, Ranking

# The number of meshes on which it looks.
MESHES = 2


def search_by_layer(
    priced: Sequence[Priced], request: TraceRequest, machine: Machine, repeats: Repeats
) -> list[Priced]:
    """Searches for layouts of policy `per_layer` that are faster than one policy for all layers.

    On each mesh a step is traced under each policy for all layers, and divided among the layers
    (ADR 51).
    The cheapest choices by these costs are traced again, and that trace has their price.

    Args:
        priced: Layouts that fit.
        request: The model and the batch.
        machine: The machine.
        repeats: The blocks of the model.

    Raises:
        PolicyError: If the model or its step fails without values.
    """
    groups = layer_groups(repeats.facts)
    divided = attrs.evolve(request, groups={path: group[0] for group in groups for path in group})
    uniform = [planned for mesh in _meshes(priced) if len(planned := _uniform(mesh, repeats)) > 1]
    steps = iter(
        _steps(
            [candidate for on_mesh in uniform for candidate in on_mesh], divided, machine, repeats
        )
    )
    chosen: list[PlannedCandidate] = []
    limits: list[float] = []
    for planned in uniform:
        costs = _Costs(planned, list(islice(steps, len(planned))), machine, repeats.facts)
        candidate = costs.cheapest(groups)
        if candidate is not None:
            plan = planning.plan(NAME, repeats.facts, candidate.mesh, candidate.options)
            chosen.append(PlannedCandidate(candidate, plan))
            limits.append(costs.seconds)
    faster: list[Priced] = []
    again = _steps(chosen, request, machine, repeats)
    for best, step, limit in zip(chosen, again, limits, strict=True):
        cost = cost_of(step, machine)
        if cost.peak <= machine.memory and cost.seconds < limit:
            faster.append(Priced(NAME, best.candidate.mesh, cost, best.candidate.options))
    return faster


def _steps(
    planned: Sequence[PlannedCandidate], request: TraceRequest, machine: Machine, repeats: Repeats
) -> list[RankStep]:
    return [
        step
        for (step,) in trace_steps(
            [[candidate] for candidate in planned], request, machine, repeats
        )
    ]


def _meshes(priced: Sequence[Priced]) -> list[Mesh]:
    """Chooses the meshes of the fastest layouts, each with another number of model ranks."""
    meshes: dict[tuple[int, ...], Mesh] = {}
    for layout in sorted(priced, key=lambda layout: layout.cost.seconds):
        mesh = _with_replicas(layout.mesh)
        if mesh is not None:
            meshes.setdefault(mesh.shape[BATCH_NDIM:], mesh)
    return list(meshes.values())[:MESHES]


def _with_replicas(mesh: Mesh) -> Mesh | None:
    """Renames the axes of a mesh to `(replica, shard, ...)`; None if it has other axes."""
    if mesh.axis_names[0] == "replica":
        return mesh
    if mesh.axis_names not in (("data",), ("data", "model")):
        return None
    return Mesh((1, *mesh.shape), ("replica", "shard", "model")[: mesh.ndim + 1])


def _uniform(mesh: Mesh, repeats: Repeats) -> list[PlannedCandidate]:
    """Plans each policy for all layers; of those with equal rules the first."""
    by_rules: dict[object, PlannedCandidate] = {}
    for name in policies_on(mesh):
        candidate = Candidate(NAME, mesh, BATCH_NDIM, {"otherwise": name})
        plan = planning.plan(NAME, repeats.short, mesh, candidate.options)
        rules = tuple((rule.key, rule.spec) for rule in plan.rules)
        by_rules.setdefault(rules, PlannedCandidate(candidate, plan))
    return list(by_rules.values())


@attrs.frozen
class _Costs:
    """The costs on a mesh under one policy for all layers.

    Args:
        planned: The policies.
        steps: The step under each.
        machine: The machine.
        facts: The facts of the model.
    """

    planned: Sequence[PlannedCandidate]
    steps: Sequence[RankStep]
    machine: Machine
    facts: LayerFacts
    costs: Sequence[StepCost] = attrs.field(init=False)
    layers: Mapping[str, LayerFacts] = attrs.field(init=False)

    @costs.default
    def _of_steps(self) -> Sequence[StepCost]:
        return [cost_of(step, self.machine) for step in self.steps]

    @layers.default
    def _by_path(self) -> Mapping[str, LayerFacts]:
        return {layer.path: layer for layer in self.facts.layers() if layer.path}

    @property
    def seconds(self) -> float:
        fit = (cost.seconds for cost in self.costs if cost.peak <= self.machine.memory)
        return min(fit, default=float("inf"))

    def cheapest(self, groups: Sequence[Sequence[str]]) -> Candidate | None:
        """Chooses the cheapest policies for groups of layers; None if they are all the same."""
        layers = [[self._layer(step.layers[group[0]]) for step in self.steps] for group in groups]
        # What is no variable of a layer takes as much as under the policy under which it has most.
        others = max(
            cost.peak - sum(costs[number].bytes for costs in layers)
            for number, cost in enumerate(self.costs)
        )
        choices = cheapest(layers, self.machine.memory - others)
        if choices is None:
            return None
        pairs = zip(groups, choices, strict=True)
        names = [self._name(group[0], number) for group, number in pairs]
        return self._candidate(groups, names) if len(set(names)) > 1 else None

    def _candidate(self, groups: Sequence[Sequence[str]], names: Sequence[str]) -> Candidate:
        """Builds the candidate with these policies; its options leave out the most frequent."""
        otherwise, _ = Counter(names).most_common(1)[0]
        by_path = {
            path: name
            for group, name in zip(groups, names, strict=True)
            for path in group
            if name != otherwise
        }
        keys = shared_keys(by_path, self.layers)
        options = {"layers": {key: by_path[paths[0]] for key, paths in keys}}
        mesh = self.planned[0].candidate.mesh
        return Candidate(NAME, mesh, BATCH_NDIM, {**options, "otherwise": otherwise})

    def _layer(self, part: RankStep) -> LayerCost:
        cost = cost_of(part, self.machine)
        moved = sum(cost.communication.values())
        hidden = (moved - cost.waited) * self.machine.hidden
        return LayerCost(cost.compute + moved - hidden, moved, cost.peak)

    def _name(self, layer: str, number: int) -> str:
        """Names the policy of that number, or the first that gives a layer the same layout."""
        specs = [specs_in(self.layers[layer], planned.plan.by_path) for planned in self.planned]
        name: str = self.planned[specs.index(specs[number])].candidate.options["otherwise"]
        return name


def search(request: TraceRequest, devices: int, machine: Machine, facts: LayerFacts) -> Ranking:
    """Prices the candidates: those that fit, the fastest first, and the others with the reason.

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
        elif _has_idle_axis(planned):
            passed_over.append(PassedOver(candidate.policy, candidate.mesh, IDLE))
        else:
            rules = tuple((rule.key, rule.spec) for rule in planned.plan.rules)
            key = candidate.small, candidate.batch_parts, rules
            group = groups_by_trace.setdefault(key, [])
            if any(candidate.mesh == other.candidate.mesh for other in group):
                passed_over.append(PassedOver(candidate.policy, candidate.mesh, EQUAL))
            else:
                group.append(planned)
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
    """Plans a candidate by its policy; or says why it needs no trace.

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


def _has_idle_axis(planned: PlannedCandidate) -> bool:
    specs = (rule.spec for rule in planned.plan.rules)
    return bool(idle_axes(planned.candidate.mesh, planned.candidate.batch_axes, specs))


def _least_bytes(planned: PlannedCandidate, facts: LayerFacts, times: Mapping[str, int]) -> int:
    """Sums the bytes of the variables and their gradients, which every step holds at once."""
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
