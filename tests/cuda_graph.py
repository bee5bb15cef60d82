"""CUDA graphs as a CPU can do them: calls that are made again on the same memory.

As on a GPU, a recording computes nothing that stays: what it writes into is restored, and so is the
random generator. A replay writes its results where those of the recording were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardcore.adapters.capture import cuda_graphs


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.calls = []

    def replay(self):
        for function, args, kwargs, results in self.calls:
            made = function(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(made), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recording(TorchDispatchMode):
    """`torch.cuda.graph`."""

    def __init__(self, graph, pool, capture_error_mode):
        super().__init__()
        self.graph, self.before, self.state = graph, {}, torch.get_rng_state()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for each in tree_leaves((args, kwargs)):
            if function._schema.is_mutable and torch.is_tensor(each):
                self.before.setdefault(each.data_ptr(), (each, each.clone()))
        results = function(*args, **kwargs)
        self.graph.calls.append((function, args, kwargs, results))
        return results

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, value in self.before.values():
            tensor.copy_(value)
        torch.set_rng_state(self.state)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Opens a context in which steps on the CPU are replayed as if they were on a GPU."""
    device = cuda_graphs._device
    with (
        patch.object(cuda_graphs, "_device", lambda *form: device(*form).replace("cpu", "cuda")),
        patch.object(cuda_graphs, "_free_bytes", lambda: 10**10),
        patch.object(torch.cuda, "graph_pool_handle", object),
        patch.object(torch.cuda, "CUDAGraph", Graph),
        patch.object(torch.cuda, "graph", Recording),
    ):
        yield
