"""Sharded checkpoints of Keras models: what is saved and loaded, and when."""
