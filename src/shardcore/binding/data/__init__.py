"""Batches: the rows of this rank, from arrays, loaders and generators."""
