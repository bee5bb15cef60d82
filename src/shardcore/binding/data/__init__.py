"""Batches: the rows of this rank, from arrays, loaders and generators.

Import the functions of `batches`, and from `data_adapters` what loads the rows.
"""
