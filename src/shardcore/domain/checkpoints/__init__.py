"""Checkpoints as data: the pieces of each variable, which rank writes them, and the index.

Import `index.Index`, `division.divide`, `contents.match` and the boxes of `grid`.
"""
