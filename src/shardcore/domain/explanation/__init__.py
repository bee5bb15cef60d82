"""The collectives of a step, their reasons, and advice to avoid them: data for `explain()`.

Import `reasons.Facts`, `collectives.Explained` and, from `advice`, the advice.
"""
