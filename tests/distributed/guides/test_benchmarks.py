"""The contenders of the benchmarks train one model: only then may their times be compared."""

import contextlib

import attrs
import keras  # noqa: F401 - imported once, before ranks are forked
import pytest
import torch

from benchmarks import by_hand, cases, contenders, memory, peers, rounds, rows
from benchmarks.contender import CAPTURED, HAND, KERAS, PEERS, Contender
from benchmarks.lanes import LaneFailed, open_forked
from shardcore.testing import run_ranks

WHOLE = Contender(KERAS, contenders.keras(1, "whole", None))
BY_HAND = Contender(HAND, open_forked(peers.train, 1, "whole"))
CASES = [cases.quick(case) for case in (cases.MLP, cases.CNN, cases.DECODER)]
MIB = 2**20


def failures(case, *racing):
    return {each.name: each.failure for each in rounds.run(case, racing, 1).values()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_hand_is_the_keras_model(case) -> None:
    assert failures(case, WHOLE, BY_HAND) == {KERAS: "", HAND: ""}


@pytest.mark.parametrize(
    ("case", "layout"),
    [(CASES[1], "data parallel"), *((CASES[2], each) for each in PEERS if each != "data parallel")],
    ids=lambda each: getattr(each, "name", each),
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # its logits are a view
def test_every_layout_by_hand_is_the_model(case, layout) -> None:
    peer = Contender(PEERS[layout], open_forked(peers.train, 2, layout))
    assert failures(case, BY_HAND, peer) == {HAND: "", PEERS[layout]: ""}


def test_another_model_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(by_hand, "EPSILON", 0.1)
    assert "are not those of Keras" in failures(CASES[2], WHOLE, BY_HAND)[HAND]


def test_shardcore_on_two_ranks_beside_its_peer() -> None:
    case = attrs.evolve(CASES[0], steps=1)
    racing = [
        Contender(PEERS["megatron"], open_forked(peers.train, 2, "megatron")),
        contenders.eager_and_captured("megatron", "auto")[1],
    ]
    found = rounds.run(case, racing, 2, memory=True)
    assert not any(each.failure for each in found.values())
    assert len(found[CAPTURED].seconds) == 2
    stored = [row for row in rows.memory("", PEERS["megatron"], found) if row.limit == 1.001]
    assert [row.ratio for row in stored] == pytest.approx([1.0] * 2, abs=1e-3)


def test_two_ranks_generate_the_tokens_of_one_process() -> None:
    racing = [
        Contender(str(ranks), contenders.generating(ranks, layout, strategy))
        for ranks, layout, strategy in ((1, "whole", None), (2, "megatron", "auto"))
    ]
    assert failures(CASES[2], *racing) == {"1": "", "2": ""}


def test_a_contender_that_fails_says_why() -> None:
    def train(case, layout, device):
        raise ValueError(f"no {layout} here")

    with pytest.raises(LaneFailed, match="ValueError: no such layout here"):
        open_forked(train, 2, "such layout")(CASES[0], "cpu")


def test_the_peak_of_a_step_is_what_it_needs() -> None:
    def measure(_rank):
        memory.map_large_blocks()
        torch.ones(512 * MIB // 4)  # a peak of before, to be forgotten
        memory.begin()
        kept = torch.ones(32 * MIB // 4)
        large = 64 * MIB // 4
        needed = memory.peak(lambda: torch.ones(large) + torch.ones(large))
        return needed, memory.storage_bytes(kept)

    ((needed, kept),) = run_ranks(measure, 1, init=False)
    assert kept == 32 * MIB
    assert needed["step"] == pytest.approx(3 * 64 * MIB, rel=0.05)
    assert needed["process"] == pytest.approx(kept + 3 * 64 * MIB, rel=0.05)


class Holes:
    """A step that needs 32 MiB, in a process that has made and freed blocks of other sizes."""

    def __init__(self) -> None:
        ones(24)
        self.kept = ones(*[4, 1] * 8)[1::2]

    def memory(self) -> dict[str, int]:
        return memory.peak(self.step)

    def step(self) -> None:
        ones(*[4] * 8)
        ones(24)


def ones(*mebibytes: int) -> list[torch.Tensor]:
    return [torch.ones(each * MIB // 4) for each in mebibytes]


def test_free_memory_of_the_heap_does_not_count_as_needed() -> None:
    open_lane = open_forked(lambda *_: Holes(), 1, "holes")
    with contextlib.closing(open_lane(CASES[0], "cpu", maps=True)) as lane:
        assert lane.ask("memory")["step"] == pytest.approx(32 * MIB, rel=0.05)
