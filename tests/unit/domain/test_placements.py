import pytest

from shardcore.domain.errors import LayoutError
from shardcore.domain.placements import Partial, Replicate, Shard


def test_placements_are_values():
    assert Replicate() == Replicate()
    assert Shard(1) == Shard(dim=1) != Shard(0)
    assert Partial() == Partial("sum") != Partial("avg")
    assert len({Replicate(), Replicate(), Shard(0), Shard(0), Partial(), Partial()}) == 3


def test_placements_read_well():
    assert [str(p) for p in (Replicate(), Shard(-1), Partial("max"))] == ["R", "S(-1)", "P(max)"]


@pytest.mark.parametrize("dim", [True, 1.0, "1", None])
def test_a_shard_takes_an_integer(dim):
    with pytest.raises(LayoutError, match="number of a tensor dim"):
        Shard(dim)


@pytest.mark.parametrize("op", ["mean", "SUM", None, ["sum"]])
def test_an_unknown_reduction_is_an_error_that_names_the_known(op):
    with pytest.raises(LayoutError, match=r"\('sum', 'avg', 'max', 'min', 'product'\)"):
        Partial(op)
