"""Runs one operator on a tensor subclass, so that others run where torch has no DTensor."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from shardcore.adapters.torch_private.tensors import NO_TORCH_FUNCTION, wrapper


@contextmanager
def _some_dtensor() -> Iterator[None]:
    """Opens a context in which torch finds a class DTensor, also where it has none.

    torch 2.13 imports the class for the first operator on a tensor subclass, and keeps it. Without
    the class, no operator on a tensor subclass would run.
    """
    name = "torch.distributed.tensor"
    try:
        importlib.import_module(name)
    except ImportError:
        stand_in: Any = ModuleType(name)
        stand_in.DTensor = type("DTensor", (), {})
        before = {name: sys.modules[name]} if name in sys.modules else {}
        sys.modules[name] = stand_in
        yield
        del sys.modules[name]
        sys.modules.update(before)
    else:
        yield


def find_dtensor() -> None:
    """Lets torch look for the class DTensor."""
    with _some_dtensor():
        torch.ops.aten.detach.default(
            wrapper(_Probe, (1,), (1,), torch.float32, torch.device("cpu"))
        )


class _Probe(torch.Tensor):
    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros(1)
