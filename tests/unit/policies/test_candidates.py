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
            assert host % each.mesh.axis_size("model") == 0


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
        size = dict(zip(each.mesh.axis_names, each.mesh.shape, strict=True))
        shard = size.get("shard", size["data"] if each.policy == "fully_sharded" else 1)
        model = size.get("model", 1)
        found.add((16 // shard // model, shard, model))
    assert found == ways


def test_the_small_mesh_keeps_the_axis_that_splits_no_batch():
    for each in candidates(64, host=8):
        small = each.small
        assert small.axis_names == each.mesh.axis_names
        for axis, size in zip(small.axis_names, small.shape, strict=True):
            full = each.mesh.axis_size(axis)
            assert size == (min(full, 2) if axis in each.batch_axes else full)
        assert each.batch_parts == math.prod(map(each.mesh.axis_size, each.batch_axes))
