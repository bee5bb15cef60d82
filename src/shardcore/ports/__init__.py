"""Protocols that adapters and plug-ins implement, and the types that cross them.

A plug-in imports `hookspecs`, `strategy`, `policy`, `types` and `world`.
"""
