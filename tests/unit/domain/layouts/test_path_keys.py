"""Spelling of paths, reading of keys, and the rules that match a path."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardcore.domain.errors import RuleError
from shardcore.domain.layouts.path_keys import spellings
from shardcore.domain.layouts.path_rules import Match, PathRules
from tests.unit.domain.layouts.drawn_paths import (
    EQUIVALENT_LEAVES,
    KERAS_LEAVES,
    KEYS,
    NAMES,
    PATHS,
    TORCH_LEAVES,
    naive_match,
    naive_spellings,
)

KERAS_TORCH_PAIRS = st.tuples(st.lists(NAMES, max_size=3), st.sampled_from(KERAS_LEAVES)).map(
    lambda parts: (
        "/".join([*parts[0], parts[1]]),
        ".".join([*parts[0], *EQUIVALENT_LEAVES["keras", parts[1]] - {parts[1]}]),
    )
)


@given(PATHS)
def test_spellings_are_those_of_the_definition(path):
    assert set(spellings(path)) == naive_spellings(path)
    assert spellings(path)[0] == path
    assert len(set(spellings(path))) == len(spellings(path))


@given(st.lists(KEYS, max_size=5, unique=True), PATHS)
def test_match_follows_the_definition(keys, path):
    expected, how = naive_match(keys, path)
    rules = PathRules((key, position) for position, key in enumerate(keys))
    if len(expected) > 1:
        with pytest.raises(RuleError) as caught:
            rules.match(path)
        assert repr(path) in str(caught.value)
        assert all(repr(key) in str(caught.value) for key in expected)
    elif expected:
        (key,) = expected
        assert rules.match(path) == Match(key, keys.index(key), how)
    else:
        assert rules.match(path) is None


@given(KEYS, KERAS_TORCH_PAIRS)
def test_a_key_that_matches_a_keras_path_matches_its_torch_spelling(key, pair):
    keras_path, torch_path = pair
    rules = PathRules({key: None})
    if rules.match(keras_path):
        assert rules.match(torch_path) == rules.match(keras_path)


@given(KEYS, st.lists(NAMES, max_size=3), st.sampled_from(TORCH_LEAVES))
def test_both_ways_give_one_answer_where_the_leaf_has_one_meaning(key, heads, torch_leaf):
    keras_leaves = EQUIVALENT_LEAVES["torch", torch_leaf] - {torch_leaf}
    assume(len(keras_leaves) == 1 and torch_leaf != "bias")
    rules = PathRules({key: None})
    keras_path, torch_path = "/".join([*heads, *keras_leaves]), ".".join([*heads, torch_leaf])
    assert rules.match(keras_path) == rules.match(torch_path)


@given(PATHS, PATHS)
def test_a_literal_key_means_the_same_with_slashes_and_with_dots(key, path):
    slashed, dotted = key.replace(".", "/"), key.replace("/", ".")
    with_slashes, with_dots = PathRules({slashed: 1}), PathRules({dotted: 1})
    assert (with_slashes.match(path) is None) == (with_dots.match(path) is None)


# keras.distribution.LayoutMap's docstring, Keras 3.15: keys, and the key that each path finds.
KERAS_KEYS = [".*dense.*kernel", ".*dense.*bias", ".*conv2d.*kernel", ".*conv2d.*bias"]
KERAS_DOCUMENTED = {
    "dense_1.kernel": ".*dense.*kernel",
    "dense_1.bias": ".*dense.*bias",
    "dense_2.kernel": ".*dense.*kernel",
    "dense_2.bias": ".*dense.*bias",
    "my_model/conv2d_123/kernel": ".*conv2d.*kernel",
    "my_model/conv2d_123/bias": ".*conv2d.*bias",
    "my_model/conv3d_1/kernel": None,
    "my_model/conv3d_1/bias": None,
}


def keras_layout_map_key(keys, path):
    """The rule of `LayoutMap.__getitem__` in Keras 3.15."""
    if path in keys:
        return path
    (found,) = [key for key in keys if re.fullmatch(key, path)] or [None]
    return found


@pytest.mark.parametrize(("path", "key"), KERAS_DOCUMENTED.items())
def test_the_documented_examples_of_keras_hold(path, key):
    match = PathRules(dict.fromkeys(KERAS_KEYS)).match(path)
    assert (match.key if match else None) == key == keras_layout_map_key(KERAS_KEYS, path)


@given(
    st.lists(st.sampled_from(["my_model", "dense", "dense_1", "conv2d_123", "conv3d"]), min_size=1),
    st.sampled_from(["kernel", "bias", "gamma", "output", "moving_mean"]),
)
def test_keras_keys_match_what_keras_matches(heads, leaf):
    path = "/".join([*heads, leaf])
    for key in KERAS_KEYS:
        found = PathRules({key: None}).match(path)
        assert (found is not None) == (re.fullmatch(key, path) is not None)
