"""Runs a tape: as a generated function, as Inductor's code or as a CUDA graph.

Import `program.TapeCapture`, the port.
"""
