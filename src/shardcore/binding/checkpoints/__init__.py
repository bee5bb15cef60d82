"""Sharded checkpoints of Keras models: what is saved and loaded, and when.

Import `checkpoints.Checkpoints` and `callback`; `install` imports `backup`.
"""
