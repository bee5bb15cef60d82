"""Operators on shards: their rules, the choice of layouts, and redistributions."""
