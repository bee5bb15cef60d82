"""Well-known machines: what their devices compute, and the names of these in CUDA."""

import pytest

from shardcore.domain.cost.machine import known_machines, machine_with


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-40GB", "p4d"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA L40S", None),
        ("NVIDIA A10", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla V100-PCIE-16GB", None),
    ],
)
def test_a_machine_is_known_by_the_whole_name_of_its_devices(cuda_name, name):
    machine = machine_with(cuda_name)
    assert (machine and machine.name) == name


@pytest.mark.parametrize("name", known_machines())
def test_only_devices_with_units_for_bfloat16_are_fast_in_it(name):
    machine = known_machines()[name]
    has_units = name not in ("t4", "v100")
    assert machine.speed("float16").flops > machine.speed("float32").flops
    stand_in = machine.speed("float16" if has_units else "float32")
    assert machine.speed("bfloat16") == stand_in
