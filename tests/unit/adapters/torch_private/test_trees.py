"""Nested structures are walked as torch walks them."""

from collections import OrderedDict, defaultdict, deque, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from shardcore.adapters.torch_private import tree_leaves, tree_map, tree_map_only

Pair = namedtuple("Pair", "first second")
LEAVES = st.one_of(
    st.integers(),
    st.none(),
    st.text(max_size=2),
    st.sampled_from([torch.float32, torch.Size([2, 3]), slice(1, 2), {1, 2}]),
)
NAMES = st.text(max_size=2)


def _nodes(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(NAMES, children, max_size=3),
        st.dictionaries(NAMES, children, max_size=3).map(OrderedDict),
        st.dictionaries(NAMES, children, max_size=3).map(lambda found: defaultdict(list, found)),
        st.lists(children, max_size=3).map(deque),
        st.builds(Pair, children, children),
        st.tuples(children, children).map(torch.return_types.max),
    )


NESTS = st.recursive(LEAVES, _nodes, max_leaves=12)


def _marked(leaf):
    return ["leaf", repr(leaf)]


@given(NESTS)
def test_leaves_and_maps_are_those_of_torch(nest):
    assert list(map(repr, tree_leaves(nest))) == list(map(repr, pytree.tree_leaves(nest)))
    assert repr(tree_map(_marked, nest)) == repr(pytree.tree_map(_marked, nest))
    mapped = tree_map_only(int, lambda number: number + 1, nest)
    assert repr(mapped) == repr(pytree.tree_map_only(int, lambda number: number + 1, nest))
