"""Shipped to plug-in authors: real ranks on this machine."""

from shardcore.testing.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks"]
