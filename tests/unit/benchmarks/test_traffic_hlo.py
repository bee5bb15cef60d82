"""The bytes that a step sends, read from the program of XLA."""

import doctest

import pytest

from benchmarks.traffic import (
    answers,
    comparison,
    hlo,
    models,
    page,
    sends_more,
    sent_bytes,
    stored,
    table,
)
from benchmarks.traffic.answers import Counted, Found
from benchmarks.traffic.hlo import module_traffic
from benchmarks.traffic.sent_bytes import Traffic, ring_bytes

MODULES = (
    sends_more,
    answers,
    sent_bytes,
    models,
    comparison,
    hlo,
    page,
    stored,
    table,
)
ALL_REDUCE = "all-reduce(%x), replica_groups={{0,1}}, to_apply=%add"
RECURRENT = """HloModule jit_train_step, num_partitions=2

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body.1 (arg: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %arg = (s32[], f32[4,4]{1,0}) parameter(0)
  %part = f32[4,2]{1,0} fusion(%arg), kind=kLoop, calls=%fused
  %all = f32[4,4]{0,1} all-gather(%part), channel_id=1, replica_groups=mesh['axis_0'=1,'axis_1'=2] \
{'axis_1'}, dimensions={1}, metadata={op_name="while/body/dot"}
  %next = f32[4,4]{1,0} all-reduce(%all), channel_id=2, replica_groups=[1,2]<=[2], to_apply=%add
  ROOT %out = (s32[], f32[4,4]{1,0}) tuple(%count, %next)
}

%condition.1 (arg: (s32[], f32[4,4])) -> pred[] {
  ROOT %less = pred[] compare(%count, %steps), direction=LT
}

ENTRY %main_spmd (p: f32[4,2], q: f32[3]) -> (f32[4,4], /*index=1*/f32[3]) {
  %p = f32[4,2]{1,0} parameter(0)
  %loop = (s32[], f32[4,4]{1,0}) while(%init), condition=%condition.1, body=%body.1, \
backend_config={"known_trip_count":{"n":"5"}}
  %both = (f32[], /*index=1*/f32[3]{0}) all-reduce(%a, %q), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = (f32[4,4]{1,0}, f32[3]{0}) tuple(%h, %r)
}
"""


def entry(*lines: str) -> str:
    """A module whose entry has these lines."""
    return "\n".join(["ENTRY %main (p: f32[8]) -> f32[8] {", *(f"  {each}" for each in lines), "}"])


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples(module) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted
    assert not failed


def test_the_body_of_a_loop_counts_as_often_as_it_runs() -> None:
    gathered = 4 * 4 * 4 // 2  # half of the result
    reduced = 4 * 4 * 4  # 2 * 1/2 of the operand
    scalar_and_vector = 4 + 3 * 4
    found = module_traffic(RECURRENT, 2)
    assert found.sent == 5 * (gathered + reduced) + scalar_and_vector
    assert found.calls == {"all_gather": 5, "all_reduce": 5 + 1}
    assert not found.at_least


def test_a_loop_of_unknown_length_is_one_turn_at_least() -> None:
    unknown = RECURRENT.replace('{"known_trip_count":{"n":"5"}}', "{}")
    found = module_traffic(unknown, 2)
    assert (found.sent, found.at_least) == (32 + 64 + 16, True)


def test_a_loop_of_unknown_length_that_sends_nothing_is_no_matter() -> None:
    text = "%body (p: s32[]) -> s32[] {\n  ROOT %q = s32[] add(%p, %p)\n}\n"
    text += entry("ROOT %w = s32[] while(%p), condition=%body, body=%body")
    assert module_traffic(text, 2) == Traffic()


def test_each_kind_has_its_formula() -> None:
    four = "replica_groups={{0,1,2,3}}"
    text = entry(
        f"%a = f32[8]{{0}} all-reduce(%x), {four}, to_apply=%add",  # 2 * 3/4 * 32
        f"%b = f32[8]{{0}} all-gather(%x), {four}, dimensions={{0}}",  # 3/4 * 32
        f"%c = f32[2]{{0}} reduce-scatter(%x), {four}, to_apply=%add",  # 3/4 * 4 * 8
        f"%d = f32[8]{{0}} all-to-all(%x), {four}, dimensions={{0}}",  # 3/4 * 32
        f"%e = (bf16[1,4]{{1,0}}, bf16[1,4]{{1,0}}) all-to-all(%x, %y), {four}",  # 3/4 * 16
    )
    assert module_traffic(text, 4).sent == 48 + 24 + 24 + 24 + 12


def test_a_permute_is_sent_by_its_sources() -> None:
    """Device 0 sends twice, device 1 once, and no device sends to itself."""
    text = entry(
        "%a = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1}}",
        "%b = f32[4]{0} collective-permute(%x), channel_id=2, source_target_pairs={{0,1},{1,0}}",
        "%c = f32[4]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,0},{1,1}}",
    )
    assert module_traffic(text, 2).sent == 16 + 16


def test_a_group_of_one_device_sends_nothing() -> None:
    alone = "ROOT %a = f32[8]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add"
    assert module_traffic(entry(alone), 2) == Traffic()


def test_the_branch_that_sends_most_counts() -> None:
    few, many = (
        f"%{name} (x: f32[{n}]) -> f32[{n}] {{\n  ROOT %y = f32[{n}]{{0}} {ALL_REDUCE}\n}}\n"
        for name, n in (("few", 2), ("many", 8))
    )
    choice = "ROOT %c = f32[8]{0} conditional(%p, %a, %b), branch_computations={%few, %many}"
    found = module_traffic(few + many + entry(choice), 2)
    assert (found.sent, found.calls) == (32, {"all_reduce": 1})


def test_an_operator_that_may_send_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="all-gather-start"):
        module_traffic(entry("%a = (f32[4], f32[8]) all-gather-start(%x), dimensions={0}"), 2)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all_reduce", 2 * 3 / 4 * 80),
        ("all_gather", 3 * 80),  # the operand is a shard: 3/4 of the result of 320 bytes
        ("reduce_scatter", 3 / 4 * 80),
        ("all_to_all", 3 / 4 * 80),
    ],
)
def test_ring_bytes_of_four_ranks(kind: str, sent: float) -> None:
    assert ring_bytes(kind, 80, 4) == sent
    assert ring_bytes(kind, 80, 1) == 0


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(ValueError, match="gossip"):
        ring_bytes("gossip", 80, 2)


def test_the_rank_that_sends_most_counts() -> None:
    small = Counted({"all_gather": 1}, {"all_gather": 8})
    large = Counted({"all_gather": 1}, {"all_gather": 12})
    found = answers.answer([Found(small, small), Found(large, small)])
    assert found == {
        "captured": {"sent": 12, "calls": {"all_gather": 1}},
        "eager": {"sent": 8, "calls": {"all_gather": 1}},
    }
