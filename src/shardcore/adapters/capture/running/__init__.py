"""Runs a trace: as a generated function, as Inductor's code or as a CUDA graph.

Import `program.TraceCapture`, the port.
"""
