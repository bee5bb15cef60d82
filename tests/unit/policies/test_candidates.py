"""Meshes and policies for a number of devices."""

import math

import pytest

from shardcore.policies.candidates import candidates


@pytest.mark.parametrize(("devices", "host"), [(1, 8), (12, 4), (16, 8), (1024, 8), (6, 6)])
def test_each_mesh_has_all_devices_and_its_model_axis_in_a_host(devices, host):
    found = candidates(devices, host)
    assert len(set(found)) == len(found)
    for each in found:
        assert each.mesh.size == devices
        if "model" in each.mesh.axis_names:
            assert each.mesh.axis_names[-1] == "model"
        near = [axis for axis in ("seq", "model") if axis in each.mesh.axis_names]
        assert host % each.mesh.size_along(near) == 0


def test_no_mesh_is_left_out():
    """Each way to write 16 as a product of replicas, shards and a model axis of 1, 2, 4 or 8."""
    ways = {
        (replica, shard, model)
        for replica in (1, 2, 4, 8, 16)
        for shard in (1, 2, 4, 8, 16)
        for model in (1, 2, 4, 8)
        if replica * shard * model == 16
    }
    found = set()
    for each in candidates(16, host=8):
        if "seq" in each.mesh.axis_names:
            continue
        size = dict(zip(each.mesh.axis_names, each.mesh.shape, strict=True))
        shard = size.get("shard", size["data"] if each.policy == "fully_sharded" else 1)
        model = size.get("model", 1)
        found.add((16 // shard // model, shard, model))
    assert found == ways


def test_the_small_mesh_keeps_the_axis_that_shards_no_batch():
    for each in candidates(64, host=8):
        small = each.small
        assert small.axis_names == each.mesh.axis_names
        for axis, size in zip(small.axis_names, small.shape, strict=True):
            full = each.mesh.axis_size(axis)
            assert size == (min(full, 2) if axis in each.batch_axes else full)
        assert each.batch_parts == math.prod(map(each.mesh.axis_size, each.batch_axes))


def test_sequences_and_the_model_share_a_host():
    """Each way to write 2, 4 or 8 devices of a host as sequences by a model axis."""
    found = {each.mesh.shape[1:] for each in candidates(16, host=8) if each.mesh.ndim == 3
             and "seq" in each.mesh.axis_names}  # fmt: skip
    assert found == {(2, 2), (4, 2), (2, 4)}
    (both,) = (each for each in candidates(4, host=4) if each.options)
    assert str(both) == "context_parallel (data=1, seq=2, model=2)"
    assert both.options == {"axis": "seq", "tensor": "model"}
