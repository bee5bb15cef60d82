"""Checkpoints as data: the pieces of each variable, which rank writes them, and the index.

Import `index.Index`, `contents.divide`, `contents.match` and the boxes of `grid`.
"""
