"""Operators that torch has on CUDA only, or otherwise there, on a CPU, by functions of a test.

torch registers autograd for such operators on every device, so that kernels are all that a CPU
lacks.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def on_cpu(
    functions: Mapping[str, Callable[..., Any]], operands: Mapping[str, int]
) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """A context in which the CPU has the operators of ATen in `functions`.

    It gives the calls: the operator, and the shape of the operand whose place is in `operands`.
    """
    library, calls = torch.library.Library("aten", "IMPL", "CPU"), []

    def noted(name, function):
        def run(*args, **kwargs):
            calls.append((name, tuple(args[operands.get(name, 0)].shape)))
            return function(*args, **kwargs)

        return run

    with warnings.catch_warnings():  # that the CPU has another one
        warnings.simplefilter("ignore")
        for name, function in functions.items():
            library.impl(name, noted(name, function))
    yield calls
    library._destroy()
