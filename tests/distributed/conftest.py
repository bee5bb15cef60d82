"""Imports all of shardcore once: the ranks of these tests are forked from this process.

It has one thread, as ranks have: of several, each rounds where it ends, on any machine elsewhere.
"""

import importlib
import pkgutil

import pytest
import torch

import shardcore

# The test files that `make gpu` runs: training, files, captured steps, policies, faults.
ON_GPUS = {
    *("agreement", "callbacks", "captured", "captured_changes"),
    *("captured_states", "captured_values", "compiled_steps", "cuda_graphs", "not_captured"),
    *("cuda_results", "failure", "ring_attention"),
    *("files", "functions", "lora", "loops", "mixed_precision", "policies", "train_step"),
    *("training", "variables"),
}

for module in pkgutil.walk_packages(shardcore.__path__, "shardcore."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in ON_GPUS:
            item.add_marker("gpu")
