"""Checkpoints as data: the pieces of each variable, which rank writes them, and the index."""
