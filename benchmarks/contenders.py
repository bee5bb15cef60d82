"""The contenders of each section."""

from collections.abc import Callable
from typing import Any

from benchmarks import generation, jax_lane, keras_training, peers
from benchmarks.contender import (
    CAPTURED,
    EAGER,
    HAND,
    INDUCTOR,
    INSTALLED,
    JAX,
    KERAS,
    PEERS,
    SUMS,
    Contender,
    Goal,
)
from benchmarks.lanes import Lane, open_forked


def on_two_ranks(layout: str, strategy: str) -> list[Contender]:
    """The hand-written peer, JAX where it is installed, and shardcore in three ways."""
    peer = PEERS[layout]
    jax = _jax(layout)
    than_jax = tuple(Goal(each.name, 0.6) for each in jax)
    return [
        Contender(peer, open_forked(peers.train, 2, layout)),
        *jax,
        *eager_and_captured(layout, strategy, (Goal(peer, 1.0), *than_jax)),
        inductor(layout, strategy, (Goal(peer, 0.9), *than_jax)),
    ]


def eager_and_captured(layout: str, strategy: str, goals: tuple[Goal, ...] = ()) -> list[Contender]:
    """shardcore on two ranks. The goals are those of the captured step."""
    eager = keras(2, layout, strategy, run_eagerly=True)
    captured = keras(2, layout, strategy, jit_compile="auto")
    return [
        Contender(EAGER, eager, tuple(Goal(goal.against) for goal in goals[:1])),
        Contender(CAPTURED, captured, goals, captured=True),
    ]


def inductor(layout: str, strategy: str, goals: tuple[Goal, ...]) -> Contender:
    """shardcore on two ranks, compiled."""
    return Contender(INDUCTOR, keras(2, layout, strategy, jit_compile=True), goals, captured=True)


def on_one_process() -> list[Contender]:
    """Plain Keras and plain PyTorch, and shardcore without any distribution."""
    whole = "whole"
    installed = keras(1, whole, "auto", jit_compile=False)
    captured = keras(1, whole, "single", jit_compile="auto")
    compiled = keras(1, whole, "single", jit_compile=True)
    jax = _jax(whole)
    than_jax = tuple(Goal(each.name) for each in jax)
    return [
        Contender(KERAS, keras(1, whole, None)),
        Contender(HAND, open_forked(peers.train, 1, whole), (Goal(KERAS),)),
        *jax,
        Contender(INSTALLED, installed, (Goal(KERAS, 1.05),)),
        Contender(CAPTURED, captured, (Goal(KERAS, 0.9), Goal(HAND), *than_jax), captured=True),
        Contender(INDUCTOR, compiled, (Goal(KERAS), Goal(HAND), *than_jax), captured=True),
    ]


def keras(ranks: int, layout: str, strategy: str | None, **options: Any) -> Callable[..., Lane]:
    """Keras on torch. Options are those of `compile`."""
    return open_forked(keras_training.train, ranks, layout, strategy=strategy, **options)


def generating(ranks: int, layout: str, strategy: str | None) -> Callable[..., Lane]:
    """Keras on torch, which generates tokens."""
    return open_forked(generation.generate, ranks, layout, strategy=strategy)


def sums_of_generating(strategy: str | None) -> Contender:
    """The all-reduces of a call on two ranks by gloo, which take most of it."""
    lane = open_forked(generation.sums_alone, 2, "megatron", strategy=strategy)
    return Contender(SUMS, lane)


def generating_on_jax() -> list[Contender]:
    """Keras on JAX, which generates tokens on one device and on two."""
    if not jax_lane.is_installed():
        return []
    layouts = {"one device": "whole", "data parallel": "data parallel", "megatron": "megatron"}
    return [
        Contender(f"{JAX}, {name}", jax_lane.open_jax(layout, "generate"))
        for name, layout in layouts.items()
    ]


def _jax(layout: str) -> list[Contender]:
    # Fully sharded comes from a policy of shardcore's, which Keras on JAX has not.
    if not jax_lane.is_installed() or layout == "fully sharded":
        return []
    return [Contender(JAX, jax_lane.open_jax(layout))]
