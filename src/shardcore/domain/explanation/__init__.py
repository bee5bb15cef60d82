"""The collectives of a step, their reasons, and advice to avoid them: data for `explain()`.

Import `reasons.CollectiveFacts`, `collectives.Explained` and, from `advice`, the advice.
"""
