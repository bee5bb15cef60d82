"""Checkpoints on disk: safetensors files of pieces, and an index, in a folder for each step."""
