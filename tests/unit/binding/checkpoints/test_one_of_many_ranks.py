"""One of 64 ranks reads its share of a model of 70 billion parameters from a sparse file."""

import os
from types import SimpleNamespace

import pytest
import torch

from shardcore.adapters.checkpoints import safetensors
from shardcore.adapters.checkpoints.hub_folders import HubFolders
from shardcore.binding.checkpoints import weight_loading
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.checkpoints.weight_reading import WeightReading
from shardcore.domain.checkpoints.file_format import header_of
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.world import World

MESH = Mesh((8, 8), ("data", "model"))
POSITION = 29
# The tensors of a layer of Llama 3 70B, in the file; and the variables: a pattern, a shape, a spec.
LAYER = {
    "q": ((8192, 8192), "(h d) m -> m h d", (8192, 64, 128), ("data", "model", None)),
    "k": ((1024, 8192), "(h d) m -> m h d", (8192, 8, 128), ("data", "model", None)),
    "v": ((1024, 8192), "(h d) m -> m h d", (8192, 8, 128), ("data", "model", None)),
    "o": ((8192, 8192), "m (h d) -> h d m", (64, 128, 8192), ("model", None, "data")),
    "gate": ((28672, 8192), "o i -> i o", (8192, 28672), ("data", "model")),
    "up": ((28672, 8192), "o i -> i o", (8192, 28672), ("data", "model")),
    "down": ((8192, 28672), "o i -> i o", (28672, 8192), ("model", "data")),
    "norm": ((8192,), "a -> a", (8192,), (None,)),
}
LAYERS = 80
LOADED = 2  # the layers that the rank reads here; the others have other places in the file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    keys = [(f"{n}.{name}", "bfloat16", LAYER[name][0]) for n in range(LAYERS) for name in LAYER]
    safetensors.create(path, header_of(keys))
    assert os.stat(path).st_size > 120 * 2**30
    assert os.stat(path).st_blocks * 512 < 2**20
    return path


def share(name):
    """Returns the variable as one rank of 64 has it, with a shard that is not yet zero."""
    _, _, shape, spec = LAYER[name.rpartition(".")[2]]
    sizes = (size // (1 if axis is None else 8) for size, axis in zip(shape, spec, strict=True))
    local = torch.ones(*sizes, dtype=torch.bfloat16)
    return StateTensor(name, name, "model", shape, Layout(MESH, spec), local)


def alone_on_its_host():
    """A session of 64 ranks, each on another host."""
    ranks = tuple(range(MESH.size))
    processes = SimpleNamespace(hosts=tuple(f"host {rank}" for rank in ranks))
    return SimpleNamespace(world=World(MESH, ranks, POSITION, "cpu"), processes=processes)


def test_it_reads_the_bytes_of_its_share(file):
    names = [f"{n}.{name}" for n in range(LAYERS - LOADED, LAYERS) for name in LAYER]
    mine = [share(name) for name in names]
    keys = {name: (name, LAYER[name.rpartition(".")[2]][1]) for name in names}
    with HubFolders().reading(file) as reader:
        matched = weight_loading._match(mine, keys, reader)
        assert matched.problems == ()
        assert len(matched.unused) == (LAYERS - LOADED) * len(LAYER)
        done = weight_loading._read(WeightReading(reader, alone_on_its_host()), mine, matched)
    assert done == sum(each.local.nbytes for each in mine)
    assert not any(each.local.any() for each in mine)
