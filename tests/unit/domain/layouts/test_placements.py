import pytest

from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.placements import Partial, Replicate, Shard


def test_placements_are_values():
    assert Replicate() == Replicate()
    assert Shard(1) == Shard(dim=1) == Shard(1, block=1) != Shard(0)
    assert Shard(1, 4) == Shard(1, block=4) != Shard(1)
    assert Partial() == Partial("sum") != Partial("avg")
    assert len({Replicate(), Replicate(), Shard(0), Shard(0), Partial(), Partial()}) == 3


def test_placements_read_well():
    assert [str(p) for p in (Replicate(), Shard(-1), Partial("max"))] == ["R", "S(-1)", "P(max)"]
    assert str(Shard(0, block=4)) == "S(0, block=4)"


@pytest.mark.parametrize("dim", [True, 1.0, "1", None])
def test_a_shard_takes_an_integer(dim):
    with pytest.raises(LayoutError, match="number of a tensor dim"):
        Shard(dim)


@pytest.mark.parametrize("block", [0, -2, True, 2.0, "2", None])
def test_a_block_is_one_or_more_elements(block):
    with pytest.raises(LayoutError, match="A block is 1 or more elements, got"):
        Shard(0, block)


@pytest.mark.parametrize("op", ["mean", "SUM", None, ["sum"]])
def test_an_unknown_reduction_is_an_error_that_names_the_known(op):
    with pytest.raises(LayoutError, match=r"\('sum', 'avg', 'max', 'min', 'product'\)"):
        Partial(op)
