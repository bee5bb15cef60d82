"""The blocks of a model that repeat under the rules of a plan, so that some of them show all."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil

import attrs

from shardcore.bootstrap import planning
from shardcore.bootstrap.search.traces import Job, PlannedCandidate, TraceRequest, steps
from shardcore.domain.machines.machine import Machine
from shardcore.domain.paths.rules import PathRules
from shardcore.domain.spec import DimSpec, entry_axes, spec_of
from shardcore.domain.steps.held_weights import PER_USE, WeightSize, size_of
from shardcore.domain.steps.larger_mesh import RankStep
from shardcore.domain.steps.runs import Run
from shardcore.ports.model import LayerFacts, VariableFacts
from shardcore.reporting.logs import log_of

logger = log_of("plan")

Rules = PathRules[tuple[DimSpec, ...]]


def priced_steps(
    groups: Sequence[Sequence[PlannedCandidate]],
    request: TraceRequest,
    machine: Machine,
    repeats: "Repeats",
) -> list[tuple[RankStep, ...]]:
    """Returns the steps of candidates; candidates of a group share a trace.

    A trace has only as many of the repeated blocks as it needs.

    Raises:
        PolicyError: If the model or its step fails without values.
    """
    jobs = [_job(group, repeats) for group in groups]
    found = steps(jobs, request, machine, repeats.facts) if jobs else []
    while None in found:  # more blocks at the ends differ from the inner ones
        missing = [number for number, each in enumerate(found) if each is None]
        for number in missing:
            jobs[number] = _with_more_at_the_ends(jobs[number], repeats)
        again = steps([jobs[number] for number in missing], request, machine, repeats.facts)
        for number, each in zip(missing, again, strict=True):
            found[number] = each
    return [each for each in found if each is not None]


def proven(
    repeats: "Repeats",
    candidates: Iterable[PlannedCandidate],
    request: TraceRequest,
    machine: Machine,
) -> "Repeats":
    """Returns the blocks that repeat; none if a copy of one is not the step that one more takes.

    The first of `candidates` whose trace has copies shows it.

    Raises:
        PolicyError: If the model or its step fails without values.
    """
    for planned in candidates:
        job = _job([planned], repeats)
        while job.runs:
            pair = _copied_and_traced(job, repeats)
            copied, traced = steps(pair, request, machine, repeats.facts)
            if copied is not None and traced is not None:
                return repeats if _are_equal(copied, traced) else _none(repeats)
            job = _with_more_at_the_ends(job, repeats)
    return repeats


def _none(repeats: "Repeats") -> "Repeats":
    logger.info("policy 'auto' traces all blocks: a copy of a block differs from the block")
    return Repeats(repeats.facts, ())


def _with_more_at_the_ends(job: Job, repeats: "Repeats") -> Job:
    more = tuple(
        attrs.evolve(run, reach=2 * run.reach, first=2 * run.first, last=2 * run.last)
        for run in job.runs
    )
    return _with_runs(job, tuple(run for run in more if run.copied), repeats)


def _job(group: Sequence[PlannedCandidate], repeats: "Repeats") -> Job:
    job = Job(group[0], tuple(each.candidate.mesh for each in group))
    return _with_runs(job, repeats.under(group[0]), repeats)


def _with_runs(job: Job, runs: tuple[Run, ...], repeats: "Repeats") -> Job:
    """Returns a job with runs; if it traces blocks that the short model lacks, planned by all."""
    if [run.traced for run in runs] == repeats.shortest:
        return attrs.evolve(job, runs=runs)
    candidate = job.planned.candidate
    plan = planning.plan(candidate.policy, repeats.facts, candidate.mesh, candidate.options)
    return attrs.evolve(job, runs=runs, planned=PlannedCandidate(candidate, plan))


def _copied_and_traced(job: Job, repeats: "Repeats") -> tuple[Job, Job]:
    """Returns the jobs of a step with one more block of each run: a copy, and a traced one."""
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
        """Returns the runs whose layers have names that no other layer of the model has."""
        names = Counter(layer.name for layer in facts.layers())
        runs = (tuple(run) for run in _outermost(facts))
        return cls(facts, tuple(run for run in runs if all(names[e.name] == 1 for e in run)))

    @property
    def short(self) -> LayerFacts:
        """The facts of the model with as few blocks as may be traced: policies plan by them."""
        left_out: dict[str, str] = {}  # the name of the traced block before, by path
        for run in self.runs:
            shortest = Run(_paths(run))
            left_out |= dict.fromkeys(shortest.copied, run[shortest.before - 1].name)
        return _without(self.facts, left_out) if left_out else self.facts

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

    def under(self, planned: PlannedCandidate) -> tuple[Run, ...]:
        """Returns the runs that are shortened in the trace of a candidate.

        The rules of the blocks of the short model must be equal.
        """
        rules = planned.plan.by_path
        found: list[Run] = []
        for blocks in self.runs:
            one, *others = (each for each in blocks if each.path in Run(_paths(blocks)).traced)
            if all(specs_in(each, rules) == specs_in(one, rules) for each in others):
                span = _span(one, self.facts, planned)
                run = Run(_paths(blocks), reach=span, first=span, last=span)
                found += [run] if run.copied else []
        return tuple(found)


def _paths(run: Sequence[LayerFacts]) -> tuple[str, ...]:
    return tuple(each.path for each in run)


def _without(layer: LayerFacts, left_out: Mapping[str, str]) -> LayerFacts:
    """Returns the facts of a layer without blocks; `left_out` has what stands in, by path."""
    stand_in = {e.name: left_out[e.path] for e in layer.children if e.path in left_out}
    children = tuple(_without(e, left_out) for e in layer.children if e.name not in stand_in)
    feeds = layer.feeds and tuple(
        dict.fromkeys(
            (stand_in.get(before, before), after)
            for before, after in layer.feeds
            if after not in stand_in
        )
    )
    return attrs.evolve(layer, children=children, feeds=feeds)


def _outermost(layer: LayerFacts) -> Iterator[list[LayerFacts]]:
    """Yields the runs of children of `layer`; for a child in no run, the runs of its children."""
    runs = [[child for name in run if (child := layer.child(name))] for run in layer.runs]
    yield from runs
    inside = {each.name for run in runs for each in run}
    for child in layer.children:
        if child.name not in inside:
            yield from _outermost(child)


def specs_in(layer: LayerFacts, rules: Rules) -> list[tuple[DimSpec, ...] | None]:
    """Returns the specs of the variables and the outputs of a layer and all in it, in order."""
    paths = [each.path for each in layer.all_variables()]
    paths += [each.output_path for each in layer.layers() if each.output_path]
    return [None if match is None else match.value for match in map(rules.match, paths)]


def _span(block: LayerFacts, facts: LayerFacts, planned: PlannedCandidate) -> int:
    """Returns the number of blocks whose all-gathered weights the engine holds at a time."""
    in_all, in_block = _held(facts, planned), _held(block, planned)
    return max(
        (
            ceil(size.total / in_block[size])
            for size in PER_USE
            if in_all[size] > size.total and in_block[size]
        ),
        default=1,
    )


def _held(layer: LayerFacts, planned: PlannedCandidate) -> Counter[WeightSize]:
    """Returns the bytes of the all-gathered weights of each size that the engine holds."""
    found: Counter[WeightSize] = Counter()
    for variable in layer.all_variables():
        gathered = _gathered(variable, planned)
        size = size_of(gathered)
        if gathered and size is not None:
            found[size] += gathered
    return found


def _gathered(variable: VariableFacts, planned: PlannedCandidate) -> int:
    """Returns the bytes of a weight that is all-gathered over the axes of the batch; else 0.

    It stays sharded over the other axes.
    """
    match, candidate = planned.plan.by_path.match(variable.path), planned.candidate
    spec = () if match is None else match.value
    over = [entry_axes(entry) for entry in spec]
    if not any(axis in candidate.batch_axes for axes in over for axis in axes):
        return 0
    rest = (tuple(axis for axis in axes if axis not in candidate.batch_axes) for axes in over)
    return variable.bytes_here(spec_of(tuple(rest)), candidate.mesh)
