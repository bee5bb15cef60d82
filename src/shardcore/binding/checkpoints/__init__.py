"""Sharded checkpoints of Keras models: what is saved and loaded, and when.

Import `checkpoints.Checkpoints`, `callback` and `due.Due`; `install` imports `backup`.
"""
