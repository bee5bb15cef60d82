"""Settings that every test shares."""

import os
import tomllib
import warnings
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

# Before anybody imports Keras: the backend that this project is about.
os.environ["KERAS_BACKEND"] = "torch"
# Tests have few steps. When recording them pays is tested by itself.
os.environ.setdefault("SHARDCORE_CAPTURE", "at-once")

# A loaded machine is no reason to fail: hypothesis measures no time here.
settings.register_profile("shardcore", deadline=None)
settings.load_profile("shardcore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that `make test` leaves out."""
    table = tomllib.loads(Path(__file__).with_name("long_tests.toml").read_text())
    for item in items:
        names = item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0]
        if any(name.endswith(tuple(table)) for name in names):
            item.add_marker("long")


@pytest.fixture(scope="session")
def loaded_inductor(tmp_path_factory):
    """Compiles a small program by Inductor: forked ranks inherit what that loads and finds out.

    Each rank would import 500 modules, make patterns of graphs, read torch's files for the key of
    programs on disk, and ask the compiler what it can.
    """
    # The pool of compiling processes must not be forked.
    os.environ["TORCH_WARM_POOL"] = "0"
    with warnings.catch_warnings():
        # torch 2.13 uses its deprecated `torch.jit` in this import.
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from shardcore.adapters.torch_private import inductor

    pick_vec_isa()
    if torch.cuda.is_available():
        return  # to compile would load CUDA, and no process that did can fork ranks
    operands = torch.ones(8, 8), torch.ones(8, 8)
    graph = torch.fx.symbolic_trace(lambda x, y: (torch.relu(x @ y),))
    # Of a program that is on disk already Inductor would load less.
    in_new_folder = mock.patch.dict(
        os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path_factory.mktemp("inductor"))
    )
    with in_new_folder, config.patch(compile_threads=1):  # threads must not be forked either
        inductor.compile_graph(graph, operands)
    counters.clear()
