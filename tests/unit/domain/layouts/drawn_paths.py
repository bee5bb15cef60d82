"""Paths and keys that hypothesis draws."""

import re

from hypothesis import strategies as st

# The oracle: the definition of docs/reference/rules.md, written slowly and again.
EQUIVALENT_LEAVES = {
    ("keras", "kernel"): {"kernel", "weight"},
    ("keras", "embeddings"): {"embeddings", "weight"},
    ("keras", "gamma"): {"gamma", "weight"},
    ("keras", "beta"): {"beta", "bias"},
    ("keras", "moving_mean"): {"moving_mean", "running_mean"},
    ("keras", "moving_variance"): {"moving_variance", "running_var"},
    ("keras", "recurrent_kernel"): {"recurrent_kernel", "weight_hh"},
    ("torch", "weight"): {"weight", "kernel", "embeddings", "gamma"},
    ("torch", "bias"): {"bias", "beta"},
    ("torch", "running_mean"): {"running_mean", "moving_mean"},
    ("torch", "running_var"): {"running_var", "moving_variance"},
    ("torch", "weight_hh"): {"weight_hh", "recurrent_kernel"},
}


def naive_spellings(path):
    *heads, leaf = re.split(r"[/.]", path)
    leaves = {leaf} | EQUIVALENT_LEAVES.get(("keras", leaf), set())
    if "/" not in path:
        leaves |= EQUIVALENT_LEAVES.get(("torch", leaf), set())
    joined = {separator.join([*heads, name]) for separator in "/." for name in leaves}
    return joined | {path}


def naive_match(keys, path):
    """The set of keys that match `path`, and how."""
    names = naive_spellings(path)
    literal = {key for key in keys if not re.search(r"[\\^$*+?{}\[\]()|]", key)}
    exact = {key for key in literal if key.replace(".", "/") in names} | (set(keys) & names)
    if exact:
        return exact, "exact"
    own = {path, path.replace("/", ".")} if "/" in path else set()
    patterns = naive_patterns(set(keys) - literal, own) or naive_patterns(
        set(keys) - literal, names
    )
    return patterns, "pattern"


def naive_patterns(keys, names):
    patterns = set()
    for key in keys:
        slash, dot = "/" in key, r"\." in key
        allowed = {
            name
            for name in names
            if slash == dot or ("/" if slash else ".") in name or not set("/.") & set(name)
        }
        if any(re.fullmatch(key, name) for name in allowed):
            patterns.add(key)
    return patterns


KERAS_LEAVES = [leaf for way, leaf in EQUIVALENT_LEAVES if way == "keras"]
TORCH_LEAVES = [leaf for way, leaf in EQUIVALENT_LEAVES if way == "torch"]
NAMES = st.sampled_from(["a", "b", "dense", "dense_1", "block_0", "0"])
LEAVES = st.sampled_from([*KERAS_LEAVES, *TORCH_LEAVES, "output", "scale"])
PATHS = st.builds(
    lambda heads, leaf, separator: separator.join([*heads, leaf]),
    st.lists(NAMES, max_size=3),
    LEAVES,
    st.sampled_from("/."),
)
PIECES = st.one_of(
    NAMES,
    LEAVES,
    st.sampled_from([".*", r"\d+", r"\w+", "[^/]+", "(a|b)", "/", ".", r"\.", ".", "_1?"]),
)
KEYS = st.one_of(PATHS, st.lists(PIECES, min_size=1, max_size=6).map("".join))
