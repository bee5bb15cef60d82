"""Steps that run from a trace: the controller, its guards, and what the ranks agree on.

Import `step.CapturedStep`; `install` imports `generation` and `slices`.
"""
