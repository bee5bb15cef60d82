"""A step recorded as a trace of operators on plain tensors, and run from it.

`recording` makes a trace, `passes` rewrite it, `running` runs it. Import the port
`running.program.TraceCapture`.
"""
