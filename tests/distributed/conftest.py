"""Imports all of shardcore once: the ranks of these tests are forked from this process.

It has one thread, as ranks have: of several, each rounds where it ends, on any machine elsewhere.
"""

import importlib
import pkgutil

import torch

import shardcore

for module in pkgutil.walk_packages(shardcore.__path__, "shardcore."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

torch.set_num_threads(1)
