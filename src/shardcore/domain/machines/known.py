"""Well-known machines, by their makers' data sheets.

The rates are the highest that the sheets give, without sparsity: programs reach a part of them.
`docs/reference/machines.md` has the sources. Latencies are those of `collective_cost`: no sheet has
them.
"""

import re

from shardcore.domain.machines.collective_cost import BETWEEN_HOSTS, WITHIN_A_HOST, Link
from shardcore.domain.machines.machine import Machine, Speed

_GB = 10**9
# PCI Express with 16 lanes, in one direction.
_PCIE_3, _PCIE_4 = 16e9, 32e9
_HALF = ("bfloat16", "float16")
_ONLY_FLOAT16 = ("float16",)  # bfloat16 is emulated: float32 stands in for it


def _gpus(
    name: str,
    devices: int,
    memory: int,
    half: float,
    single: float,
    bandwidth: float,
    link: float,
    nic: float,
    half_dtypes: tuple[str, ...] = _HALF,
) -> Machine:
    """Returns a host of GPUs; `link` and `nic` are bytes a second of a GPU in one direction."""
    speeds = {"float32": Speed(single, bandwidth)}
    speeds |= {dtype: Speed(half, bandwidth) for dtype in half_dtypes}
    within = Link(WITHIN_A_HOST.latency, link)
    return Machine(name, devices, memory, speeds, within, Link(BETWEEN_HOSTS.latency, nic))


def known_machines() -> dict[str, Machine]:
    """Returns the machines by name.

    Example:
        >>> list(known_machines())
        ['t4', 'v100', 'a10g', 'l4', 'rtx4090', 'p4d', 'a100', 'h100', 'h200']
    """
    machines = (
        _gpus("t4", 4, 16 * _GB, 65e12, 8.1e12, 0.32e12, _PCIE_3, 1.5625e9, _ONLY_FLOAT16),
        _gpus("v100", 8, 32 * _GB, 125e12, 15.7e12, 0.9e12, 150e9, 1.5625e9, _ONLY_FLOAT16),
        _gpus("a10g", 8, 24 * _GB, 70e12, 35e12, 0.6e12, _PCIE_4, 1.5625e9),
        _gpus("l4", 8, 24 * _GB, 121e12, 30.3e12, 0.3e12, _PCIE_4, 1.5625e9),
        _gpus("rtx4090", 2, 24 * _GB, 165.2e12, 82.6e12, 1.008e12, _PCIE_4, 0.625e9),
        _gpus("p4d", 8, 40 * _GB, 312e12, 19.5e12, 1.555e12, 300e9, 6.25e9),
        _gpus("a100", 8, 80 * _GB, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        _gpus("h100", 8, 80 * _GB, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        _gpus("h200", 8, 141 * _GB, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    )
    return {machine.name: machine for machine in machines}


# The whole names that CUDA gives the devices. A part of a device (MIG), and a variant with other
# rates such as "NVIDIA H100 PCIe", is no device of these machines.
_CUDA_NAMES = {
    "t4": r"(Tesla|NVIDIA) T4",
    "v100": r"(Tesla|NVIDIA) V100-SXM[23]-(16|32)GB(-LS)?",
    "a10g": r"NVIDIA A10G",
    "l4": r"NVIDIA L4",
    "rtx4090": r"NVIDIA GeForce RTX 4090",
    "p4d": r"(NVIDIA )?A100-SXM4-40GB",
    "a100": r"(NVIDIA )?A100-SXM4-80GB",
    "h100": r"NVIDIA H100( 80GB HBM3)?",
    "h200": r"NVIDIA H200",
}


def machine_with(cuda_name: str) -> Machine | None:
    """Returns the machine whose devices have a name in CUDA; None if no known one has.

    Example:
        >>> machine_with("Tesla T4").speed("float16").flops
        65000000000000.0
        >>> machine_with("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
    """
    matches = (name for name, names in _CUDA_NAMES.items() if re.fullmatch(names, cuda_name))
    name = next(matches, None)
    return None if name is None else known_machines()[name]
