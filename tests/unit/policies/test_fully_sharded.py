"""Policy `fully_sharded`: what pays is sharded, evenly where it can be, and nothing is lost."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import MeshError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import data_parallel
from shardcore.policies.data_parallel import plan_fully_sharded
from shardcore.policies.specs import SMALL
from shardcore.ports.policy import LayerFacts, VariableFacts

MESH = Mesh((4, 2), ("data", "model"))
shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)


def holding(*shapes, itemsize=4):
    variables = [VariableFacts(f"v_{n}", shape, itemsize) for n, shape in enumerate(shapes)]
    return LayerFacts("model", ("Model",), variables=tuple(variables))


def spec(shape, mesh=MESH, **options):
    return plan_fully_sharded(holding(shape), mesh, **{"small": 0, **options})["v_0"].spec


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 16), (None, "data")),  # the largest
        ((16, 16), ("data", None)),  # of equal ones the first
        ((8, 30), ("data", None)),  # the one that 4 divides, though the other is larger
        ((3, 3, 64, 64), (None, None, "data", None)),
        ((30, 9), ("data", None)),  # none divides: the largest, unevenly
        ((3, 3), (None, None)),  # a rank would have nothing
        ((), ()),
        ((0, 8), (None, None)),  # nothing to spare
    ],
)
def test_the_dim(shape, expected):
    assert spec(shape) == expected


@given(shapes, st.integers(1, 6), st.integers(0, 3000), st.sampled_from([1, 2, 4]))
def test_every_element_is_somewhere_once_and_every_rank_is_spared(shape, ranks, small, itemsize):
    mesh = Mesh((ranks, 2), ("data", "model"))
    chosen = plan_fully_sharded(holding(shape, itemsize=itemsize), mesh, small=small)["v_0"].spec
    layout = Layout(mesh, chosen)
    parts = [prod(layout.local_shape(shape, rank)) for rank in range(0, mesh.size, 2)]
    if not any(chosen):
        assert parts == [prod(shape)] * ranks
        return
    assert sum(parts) == prod(shape)
    assert prod(shape) * itemsize - max(parts) * itemsize >= max(small, 1)
    assert [axis for axis in chosen if axis] == ["data"]
    (dim,) = (dim for dim, axis in enumerate(chosen) if axis)
    assert shape[dim] % ranks == 0 or not any(size and size % ranks == 0 for size in shape)


def test_small_variables_are_replicated_by_default_with_a_reason():
    kernel, bias = (512, 512), (512,)
    chosen = plan_fully_sharded(holding(kernel, bias), MESH)
    assert chosen["v_0"].spec == ("data", None)
    assert chosen["v_1"].spec == (None,)
    assert chosen["v_1"].reason == "replicated: sharding would save 1536 bytes only"
    fits = -(-SMALL // 12) * 4  # elements of 4 bytes, of which three quarters are spared
    assert spec((fits,), small=SMALL) == ("data",)
    assert spec((fits - 4,), small=SMALL) == (None,)
    assert spec((8, 16), small=384) == (None, "data")  # exactly three quarters of 512
    assert spec((8, 16), small=385) == (None, None)


def test_the_reason_names_an_uneven_sharding():
    chosen = plan_fully_sharded(holding((30, 9)), MESH, small=0)
    assert chosen["v_0"].reason == "dim 0 sharded, unevenly"


def test_the_axis_is_the_first_or_the_one_that_is_asked_for():
    assert spec((8, 8), Mesh((2, 2), ("batch", "tensor"))) == ("batch", None)
    assert spec((8, 8), axis="model") == ("model", None)
    with pytest.raises(MeshError, match="no axis 'modell'"):
        spec((8, 8), axis="modell")


@given(st.lists(shapes, max_size=5))
def test_data_parallel_shards_nothing(several):
    chosen = data_parallel.plan(holding(*several), MESH)
    assert [each.spec for each in chosen.values()] == [(None,) * len(shape) for shape in several]
    assert all("summed over 'data'" in each.reason for each in chosen.values())


def test_an_axis_of_one_rank_is_the_reason_to_replicate():
    chosen = plan_fully_sharded(holding((512, 512)), Mesh((1, 2), ("data", "model")))
    assert chosen["v_0"].reason == "replicated: axis 'data' has one rank"
