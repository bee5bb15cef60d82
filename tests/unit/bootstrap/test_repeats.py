"""The number of equal blocks that a trace has, by the gathered weights that the engine holds."""

import pytest

from shardcore.bootstrap.repeats import Repeats
from shardcore.bootstrap.traces import PlannedCandidate
from shardcore.domain.mesh import Mesh
from shardcore.policies.candidates import Candidate
from shardcore.policies.rules import Planned, Rule
from shardcore.ports.model import LayerFacts, VariableFacts

KIB = 1024 // 4  # elements
MIB = 1024 * KIB


def traced(count, *sizes):
    """Returns how many of `count` blocks with sharded weights of so many elements are traced."""
    names = [f"block_{number}" for number in range(count)]
    blocks = tuple(
        LayerFacts(
            name,
            ("Block",),
            variables=tuple(VariableFacts(f"{name}/{at}", (n,)) for at, n in enumerate(sizes)),
            path=name,
        )
        for name in names
    )
    facts = LayerFacts("model", ("Functional",), children=blocks, runs=(tuple(names),))
    mesh = Mesh((2,), ("data",))
    planned = Planned((Rule(".*", ("data",), "any"),), ("data",))
    runs = Repeats.of(facts).under(PlannedCandidate(Candidate("any", mesh), planned))
    return [len(run.traced) for run in runs]


@pytest.mark.parametrize("count", [24, 96])
def test_as_many_blocks_are_traced_however_many_there_are(count):
    small = (*[48 * KIB] * 8, 192 * KIB)
    assert traced(count, *[600 * MIB] * 6, *small) == [4]  # the shape of GPT-3
    assert traced(count, *[4 * MIB] * 12, *[4 * KIB] * 9) == [4]
    assert traced(count, 10 * MIB, *small) == [10]  # those of three blocks are held


def test_all_blocks_are_traced_if_the_engine_holds_the_weights_of_most():
    assert traced(24, 600 * KIB) == [4]  # all are held
    assert traced(96, 600 * KIB) == []  # those of 43
    assert traced(300, 512 * KIB) == []  # those of 200
