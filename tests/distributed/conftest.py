"""Imports all of shardcore once: the ranks of these tests are forked from this process."""

import importlib
import pkgutil

import shardcore

for module in pkgutil.walk_packages(shardcore.__path__, "shardcore."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
