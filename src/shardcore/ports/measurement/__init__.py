"""The watch over a step: protocols that `adapters.measurement` provides, and what a thread runs.

Import `MemoryTracer` and `EventTracer` from `tracers`; from `trace_context` the scopes and
`CollectiveTracer`.
"""
