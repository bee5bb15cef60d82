"""The state of a Keras distribution on this process, and what its ranks check together.

Import `session.Session`; `collective_errors` and `rank_consistency` for what all ranks do.
"""
