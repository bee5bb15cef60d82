"""Guards of Python state: what the code of a step may read, and whether it is still the same.

Import `guard.PythonGuard` and `observed.ObservedCalls`; `rules` has the tables of known code.
"""
