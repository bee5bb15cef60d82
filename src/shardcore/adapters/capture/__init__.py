"""A step recorded as a tape of operators on plain tensors, and run from it.

`recording` makes a tape, `passes` rewrite it, `running` runs it. Import the port
`running.program.TapeCapture`.
"""
