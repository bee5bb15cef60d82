"""Checkpoints on disk: safetensors files of pieces, and an index, in a folder for each step.

Import `store.FolderStore`, which is the port, and the functions of `folders`.
"""
