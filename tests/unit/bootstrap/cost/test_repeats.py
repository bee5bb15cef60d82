"""The number of equal blocks that a trace has, and when more of them are traced."""

import attrs
import pytest

from shardcore.bootstrap.cost.repeats import Repeats, trace_steps, verify_repeats
from shardcore.bootstrap.cost.traces import PlannedCandidate, TraceRequest
from shardcore.domain.cost.machine import known_machines
from shardcore.domain.cost.rank_step import RankStep
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.candidates import Candidate
from shardcore.policies.rules import PlannedRules, Rule
from shardcore.ports.policy import LayerFacts, VariableFacts

KIB = 1024 // 4  # elements
MIB = 1024 * KIB


MESH = Mesh((2,), ("data",))


def repeats(count, *sizes):
    """Returns `count` blocks with weights of so many elements."""
    names = [f"block_{number}" for number in range(count)]
    blocks = tuple(
        LayerFacts(
            name,
            ("Block",),
            variables=tuple(
                VariableFacts(f"{name}/{at}", n if isinstance(n, tuple) else (n,))
                for at, n in enumerate(sizes)
            ),
            path=name,
        )
        for name in names
    )
    return Repeats.of(LayerFacts("model", ("Functional",), children=blocks, runs=(tuple(names),)))


def planned(policy):
    """Returns a candidate whose rules shard all weights."""
    rules = PlannedRules((Rule(".*", ("data",), policy),), ("data",))
    return PlannedCandidate(Candidate(policy, MESH), rules)


def traced(count, *sizes):
    """Returns how many of `count` blocks with sharded weights of so many elements are traced."""
    return [len(run.traced) for run in repeats(count, *sizes).runs_of(planned("any"))]


@pytest.mark.parametrize("count", [24, 96])
def test_as_many_blocks_are_traced_however_many_there_are(count):
    small = (*[48 * KIB] * 8, 192 * KIB)
    assert traced(count, *[600 * MIB] * 6, *small) == [4]  # the shape of GPT-3
    assert traced(count, *[4 * MIB] * 12, *[4 * KIB] * 9) == [4]
    assert traced(count, 10 * MIB, *small) == [12]  # those of three blocks are held


def test_all_blocks_are_traced_if_the_engine_holds_the_weights_of_most():
    assert traced(24, 600 * KIB) == [4]  # all are held
    assert traced(96, 600 * KIB) == []  # those of 43
    assert traced(300, 512 * KIB) == []  # those of 200


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (("data", None), [4]),  # 32 MiB: none is held
        (("data", "model"), [16]),  # 8 MiB: those of four blocks
        (("model", "data"), [16]),
        ((("data", "model"), None), [16]),
        (("model", None), [4]),  # it is not all-gathered
    ],
)
def test_weights_that_are_sharded_over_the_model_axis_too_are_held_by_their_shards(spec, expected):
    mesh = Mesh((2, 4), ("data", "model"))
    rules = PlannedRules((Rule(".*", spec, "any"),), ("data",))
    candidate = PlannedCandidate(Candidate("any", mesh), rules)
    assert [len(run.traced) for run in repeats(24, (2048, 4096)).runs_of(candidate)] == expected


REQUEST, MACHINE = TraceRequest(lambda: None, None, 2), known_machines()["a100"]


def test_more_blocks_at_the_ends_are_traced_if_the_inner_ones_of_few_differ(monkeypatch):
    asked = []

    def steps(jobs, _request, _machine, _facts):
        asked.append([len(run.traced) for run in jobs[0].runs])
        return [None if len(asked) < 2 else (RankStep(MESH, (), (), {"variables": 1}),)]

    monkeypatch.setattr("shardcore.bootstrap.cost.repeats.steps", steps)
    blocks = repeats(16, 600 * MIB)
    ((step,),) = trace_steps([[planned("fully_sharded")]], REQUEST, MACHINE, blocks)
    assert asked == [[4], [8]]
    assert step.memory == {"variables": 1}


def test_a_candidate_whose_few_inner_blocks_differ_is_proven_by_more(monkeypatch):
    asked = []

    def steps(jobs, _request, _machine, _facts):
        asked.append([len(job.runs[0].traced) for job in jobs])
        step = (RankStep(MESH, (), (), {"variables": 1}),)
        return [None if len(asked) < 2 else step, step]

    monkeypatch.setattr("shardcore.bootstrap.cost.repeats.steps", steps)
    found = verify_repeats(repeats(16, 600 * MIB), [planned("fully_sharded")], REQUEST, MACHINE)
    assert asked == [[4, 5], [8, 9]]
    assert len(found.runs) == 1


def test_a_candidate_without_copies_leaves_the_proof_to_the_next(monkeypatch):
    asked = []

    def steps(jobs, _request, _machine, _facts):
        asked.append([(job.planned, len(job.runs[0].traced)) for job in jobs])
        return [(RankStep(MESH, (), (), {"variables": 1}),)] * 2

    monkeypatch.setattr("shardcore.bootstrap.cost.repeats.steps", steps)
    replicated = attrs.evolve(planned("data_parallel"), plan=PlannedRules((), ("data",)))
    both = [planned("fully_sharded"), replicated]
    assert len(verify_repeats(repeats(96, 600 * KIB), both, REQUEST, MACHINE).runs) == 1
    assert [[count for _, count in pair] for pair in asked] == [[4, 5]]


@pytest.mark.parametrize(("copy", "runs"), [(100, 1), (200, 0)])
def test_no_block_is_a_copy_if_one_more_takes_another_step_than_a_copy(copy, runs, monkeypatch):
    def steps(jobs, _request, _machine, _facts):
        assert [len(job.runs[0].traced) for job in jobs] == [4, 5]
        return [(RankStep(MESH, (), (), {"variables": size}),) for size in (copy, 100)]

    monkeypatch.setattr("shardcore.bootstrap.cost.repeats.steps", steps)
    found = verify_repeats(repeats(16, 600 * MIB), [planned("fully_sharded")], REQUEST, MACHINE)
    assert len(found.runs) == runs
