"""The ranks of a job: how they start, exchange values, and end together.

`job` is below `failure`, which watches it. Import `processes.TorchProcesses`, the port,
and `waiting.wait` for collectives of tensors.
"""
