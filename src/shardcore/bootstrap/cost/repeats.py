"""The blocks of a model that repeat under a plan: a few of them are traced for all (ADR 46)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil

import attrs

from shardcore.bootstrap import planning
from shardcore.bootstrap.cost.traces import Job, PlannedCandidate, TraceRequest, steps
from shardcore.domain.cost.machine import Machine
from shardcore.domain.cost.rank_step import RankStep
from shardcore.domain.cost.runs import Run
from shardcore.domain.engine.held_weights import PER_USE, WeightSize, size_of
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import DimSpec, entry_axes, spec_of
from shardcore.ports.policy import LayerFacts, VariableFacts
from shardcore.reporting.logs import log_of

logger = log_of("plan")

Rules = PathRules[tuple[DimSpec, ...]]


def trace_steps(
    groups: Sequence[Sequence[PlannedCandidate]],
    request: TraceRequest,
    machine: Machine,
    repeats: "Repeats",
) -> list[tuple[RankStep, ...]]:
    """Traces the steps of candidates; candidates of a group share a trace.

    A trace has only as many of the repeated blocks as it needs.

    Raises:
        PolicyError: If the model or its step fails without values.
    """
    jobs = [_job(group, repeats) for group in groups]
    steps_by_job = steps(jobs, request, machine, repeats.facts) if jobs else []
    while None in steps_by_job:  # more blocks at the ends differ from the inner ones
        missing = [
            number for number, steps_of_job in enumerate(steps_by_job) if steps_of_job is None
        ]
        for number in missing:
            jobs[number] = _with_more_at_the_ends(jobs[number], repeats)
        again = steps([jobs[number] for number in missing], request, machine, repeats.facts)
        for number, steps_of_job in zip(missing, again, strict=True):
            steps_by_job[number] = steps_of_job
    return [steps_of_job for steps_of_job in steps_by_job if steps_of_job is not None]


def verify_repeats(
    repeats: "Repeats",
    candidates: Iterable[PlannedCandidate],
    request: TraceRequest,
    machine: Machine,
) -> "Repeats":
    """Checks that a copied block costs what a traced one costs; returns no repeats if it does not.

    The first of `candidates` whose trace has copies is checked.

    Raises:
        PolicyError: If the model or its step fails without values.
    """
    for planned in candidates:
        job = _job([planned], repeats)
        while job.runs:
            pair = _copied_and_traced(job, repeats)
            copied, traced = steps(pair, request, machine, repeats.facts)
            if copied is not None and traced is not None:
                return repeats if _are_equal(copied, traced) else _without_repeats(repeats)
            job = _with_more_at_the_ends(job, repeats)
    return repeats


def _without_repeats(repeats: "Repeats") -> "Repeats":
    logger.info("policy 'auto' traces all blocks: a copy of a block differs from the block")
    return Repeats(repeats.facts, ())


def _with_more_at_the_ends(job: Job, repeats: "Repeats") -> Job:
    more = tuple(
        attrs.evolve(run, reach=2 * run.reach, first=2 * run.first, last=2 * run.last)
        for run in job.runs
    )
    return _with_runs(job, tuple(run for run in more if run.copied), repeats)


def _job(group: Sequence[PlannedCandidate], repeats: "Repeats") -> Job:
    job = Job(group[0], tuple(planned.candidate.mesh for planned in group))
    return _with_runs(job, repeats.runs_of(group[0]), repeats)


def _with_runs(job: Job, runs: tuple[Run, ...], repeats: "Repeats") -> Job:
    """Sets the runs of a job; if it traces blocks that the short model lacks, plans it by all."""
    if [run.traced for run in runs] == repeats.shortest:
        return attrs.evolve(job, runs=runs)
    candidate = job.planned.candidate
    plan = planning.plan(candidate.policy, repeats.facts, candidate.mesh, candidate.options)
    return attrs.evolve(job, runs=runs, planned=PlannedCandidate(candidate, plan))


def _copied_and_traced(job: Job, repeats: "Repeats") -> tuple[Job, Job]:
    """Makes two jobs of a step with one more block of each run: a copy, and a traced one."""
    more = tuple(attrs.evolve(run, last=run.last + 1) for run in job.runs)
    pairs = zip(job.runs, more, strict=True)
    copies = tuple(attrs.evolve(run, paths=longer.traced) for run, longer in pairs)
    small = (job.planned.candidate.small,)
    return (
        attrs.evolve(job, meshes=small, longer=copies),
        attrs.evolve(_with_runs(job, more, repeats), meshes=small, longer=()),
    )


def _are_equal(ones: tuple[RankStep, ...], others: tuple[RankStep, ...]) -> bool:
    (one,), (other,) = ones, others
    same = set(one.work) == set(other.work) and set(one.collectives) == set(other.collectives)
    return same and one.memory == other.memory


@attrs.frozen
class Repeats:
    """The blocks of a model that repeat.

    Args:
        facts: The facts of the model.
        runs: Equal blocks in a row; no block is in another one.
    """

    facts: LayerFacts
    runs: tuple[tuple[LayerFacts, ...], ...]

    @classmethod
    def of(cls, facts: LayerFacts) -> "Repeats":
        """Finds the runs whose layers have names that no other layer of the model has."""
        names = Counter(layer.name for layer in facts.layers())
        runs = (tuple(run) for run in _outermost_runs(facts))
        return cls(facts, tuple(run for run in runs if all(names[e.name] == 1 for e in run)))

    @property
    def short(self) -> LayerFacts:
        """The facts of the model with as few blocks as may be traced: policies plan by them."""
        replaced: dict[str, str] = {}  # the name of the traced block before, by path
        for run in self.runs:
            shortest = Run(_paths(run))
            replaced |= dict.fromkeys(shortest.copied, run[shortest.traced_before - 1].name)
        return _without_blocks(self.facts, replaced) if replaced else self.facts

    @property
    def shortest(self) -> list[tuple[str, ...]]:
        """The paths of the blocks that the short model has, of each run that it shortens."""
        runs = (Run(_paths(run)) for run in self.runs)
        return [run.traced for run in runs if run.copied]

    @property
    def times(self) -> dict[str, int]:
        """The number of blocks for which a block of the short model stands, by path."""
        shortest = (Run(_paths(run)) for run in self.runs)
        return {run.traced[1]: 1 + len(run.copied) for run in shortest if run.copied}

    def runs_of(self, planned: PlannedCandidate) -> tuple[Run, ...]:
        """Finds the runs that are shortened in the trace of a candidate.

        The rules of the blocks of the short model must be equal.
        """
        rules = planned.plan.by_path
        runs: list[Run] = []
        for blocks in self.runs:
            one, *others = (block for block in blocks if block.path in Run(_paths(blocks)).traced)
            if all(specs_in(other, rules) == specs_in(one, rules) for other in others):
                span = _span(one, self.facts, planned)
                run = Run(_paths(blocks), reach=span, first=span, last=span)
                runs += [run] if run.copied else []
        return tuple(runs)


def _paths(run: Sequence[LayerFacts]) -> tuple[str, ...]:
    return tuple(block.path for block in run)


def _without_blocks(layer: LayerFacts, replaced: Mapping[str, str]) -> LayerFacts:
    """Leaves blocks out of the facts of a layer; `replaced` has what stands in, by path."""
    stand_in = {
        child.name: replaced[child.path] for child in layer.children if child.path in replaced
    }
    children = tuple(
        _without_blocks(child, replaced) for child in layer.children if child.name not in stand_in
    )
    feeds = layer.feeds and tuple(
        dict.fromkeys(
            (stand_in.get(before, before), after)
            for before, after in layer.feeds
            if after not in stand_in
        )
    )
    return attrs.evolve(layer, children=children, feeds=feeds)


def _outermost_runs(layer: LayerFacts) -> Iterator[list[LayerFacts]]:
    """Yields the runs of children of `layer`; for a child in no run, the runs of its children."""
    runs = [[child for name in run if (child := layer.child(name))] for run in layer.runs]
    yield from runs
    inside = {block.name for run in runs for block in run}
    for child in layer.children:
        if child.name not in inside:
            yield from _outermost_runs(child)


def specs_in(layer: LayerFacts, rules: Rules) -> list[tuple[DimSpec, ...] | None]:
    """Lists the specs of the variables and the outputs of a layer and all in it, in order."""
    paths = [variable.path for variable in layer.all_variables()]
    paths += [inner.output_path for inner in layer.layers() if inner.output_path]
    return [None if match is None else match.value for match in map(rules.match, paths)]


def _span(block: LayerFacts, facts: LayerFacts, planned: PlannedCandidate) -> int:
    """Counts the blocks whose all-gathered weights the engine holds at a time."""
    in_all, in_block = _held_bytes(facts, planned), _held_bytes(block, planned)
    return max(
        (
            ceil(size.total / in_block[size])
            for size in PER_USE
            if in_all[size] > size.total and in_block[size]
        ),
        default=1,
    )


def _held_bytes(layer: LayerFacts, planned: PlannedCandidate) -> Counter[WeightSize]:
    held: Counter[WeightSize] = Counter()
    for variable in layer.all_variables():
        gathered = _gathered_bytes(variable, planned)
        size = size_of(gathered)
        if gathered and size is not None:
            held[size] += gathered
    return held


def _gathered_bytes(variable: VariableFacts, planned: PlannedCandidate) -> int:
    """Counts the bytes of a weight that is all-gathered over the axes of the batch; else 0.

    It stays sharded over the other axes.
    """
    match, candidate = planned.plan.by_path.match(variable.path), planned.candidate
    spec = () if match is None else match.value
    over = [entry_axes(entry) for entry in spec]
    if not any(axis in candidate.batch_axes for axes in over for axis in axes):
        return 0
    rest = (tuple(axis for axis in axes if axis not in candidate.batch_axes) for axes in over)
    return variable.bytes_here(spec_of(tuple(rest)), candidate.mesh)
