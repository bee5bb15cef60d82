"""Ranks compare batches by a digest of their values, whatever the strides."""

import torch

from shardcore.binding.ranks.rank_consistency import digest

ROWS = torch.arange(12.0).reshape(4, 3)


def test_a_digest_depends_on_the_values_and_not_on_the_strides():
    column = ROWS[:, :1]
    assert digest(column) == digest(column.clone()) == digest(column.reshape(-1))
    assert digest(ROWS.T) == digest(ROWS.T.clone(memory_format=torch.contiguous_format))
    assert digest(ROWS[:, 1:2]) != digest(column)
