"""Loads all of shardcore once: the ranks of these tests are forked from this process.

It has one thread, as ranks have: of several, each rounds where it ends, on any machine elsewhere.
"""

import pytest

# The test files that `make gpu` runs: training, files, captured steps, policies, faults.
ON_GPUS = {
    *("agreement", "callbacks", "captured", "captured_changes"),
    *("captured_states", "captured_values", "compiled_steps", "cuda_graphs", "not_captured"),
    *("cuda_results", "failure", "ring_attention"),
    *("files", "functions", "lora", "loops", "mixed_precision", "policies", "train_step"),
    *("training", "variables"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests for GPUs; loads shardcore, but not in a process that only hands tests out."""
    for item in items:
        if item.path.stem.removeprefix("test_") in ON_GPUS:
            item.add_marker("gpu")
    from tests import warm

    warm.load()
