"""Attention and its gradient: on shards of rows and heads, or in a ring of sequences.

The planners are those of `attention`.
"""
