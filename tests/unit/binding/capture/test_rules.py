"""The tables of the rule of captured steps name functions that exist."""

import concurrent.futures
import gc
import importlib
import inspect
import linecache
import queue
import threading
import traceback
import typing
from types import FunctionType, ModuleType

import IPython
import numpy as np
import torch
import traitlets.config
from absl import logging

from shardcore.binding.capture.python_state import rules
from shardcore.binding.capture.python_state.code_facts import module_of

# They define what the tables name.
MODULES: tuple[ModuleType, ...] = (
    *(concurrent.futures, importlib, inspect, linecache, queue, threading, traceback, typing),
    *(IPython, np, torch, traitlets.config, logging),
)


def names_of_functions():
    codes = [each.__code__ for each in gc.get_objects() if type(each) is FunctionType]
    return {f"{module_of(code).partition('.')[0]}.{code.co_qualname}" for code in codes}


def test_each_function_of_the_table_exists():
    assert rules.REFUSED_FUNCTIONS - names_of_functions() == set()
