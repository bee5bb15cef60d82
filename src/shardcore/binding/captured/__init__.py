"""Steps that run from a trace: the controller, its guards, and what the ranks agree on.

Import `step.CapturedStep`; loops in `layers` import `closures` and `local_tensors` too.
"""
