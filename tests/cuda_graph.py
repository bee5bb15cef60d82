"""CUDA graphs as a CPU can do them: calls that are made again on the same memory.

As on a GPU, a recording computes nothing that stays: what it writes into is restored, and so is the
random generator. A replay writes its results where those of the recording were. A pool takes no
graph after all that it had are gone; after a failure, a draw is an error until the generator has
another state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardcore.adapters import torch_private
from shardcore.adapters.capture.running import cuda_graphs
from shardcore.adapters.torch_private import collectives


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.calls = []

    def reset(self):
        self.calls = None

    def replay(self):
        for function, args, kwargs, results in self.calls:
            made = function(*args, **kwargs)
            if torch_private.is_collective(function):  # a replay gives what the collective has made
                made = tree_map(collectives.wait, made)
            for old, new in zip(tree_leaves(results), tree_leaves(made), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Event:
    """`torch.cuda.Event`: the CPU has finished what came before."""

    def record(self):
        """Notes nothing."""

    def query(self):
        return True


class Pool:
    """`torch.cuda.graph_pool_handle`."""

    def __init__(self):
        self.was_used, self.graphs = False, WeakSet()


class Generator:
    """The one of a GPU."""

    def __init__(self):
        self.records = False

    def clone_state(self):
        return Generator()

    def graphsafe_set_state(self, other):
        self.records = other.records


class Recording(TorchDispatchMode):
    """`torch.cuda.graph`."""

    def __init__(self, graph, pool, capture_error_mode):
        super().__init__()
        if pool.was_used and not pool.graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if torch.cuda.default_generators[0].records:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        pool.was_used = True
        pool.graphs.add(graph)
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
        torch.cuda.default_generators[0].records = error[0] is not None
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
        patch.object(torch.cuda, "graph_pool_handle", Pool),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "set_device", lambda device: None),
        patch.object(torch.cuda, "default_generators", (Generator(),)),
        patch.object(torch.cuda, "CUDAGraph", Graph),
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch_private, "runs_on_gloo", lambda *group: False),
        patch.object(torch.cuda, "graph", Recording),
    ):
        yield
