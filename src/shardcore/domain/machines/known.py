"""Well-known machines, by their makers' data sheets.

The rates are the highest that the sheets give, without sparsity: programs reach a part of them.
`docs/reference/machines.md` has the sources. Latencies are those of `collective_cost`: no sheet has
them.
"""

from shardcore.domain.machines.collective_cost import BETWEEN_HOSTS, WITHIN_A_HOST, Link
from shardcore.domain.machines.machine import Machine, Speed

_GB = 10**9


def _gpus(
    name: str, memory: int, half: float, single: float, bandwidth: float, nvlink: float, nic: float
) -> Machine:
    """Returns a host of eight GPUs; `nvlink` and `nic` are bytes a second in one direction."""
    speeds = {
        "float32": Speed(single, bandwidth),
        "bfloat16": Speed(half, bandwidth),
        "float16": Speed(half, bandwidth),
    }
    within = Link(WITHIN_A_HOST.latency, nvlink)
    return Machine(name, 8, memory, speeds, within, Link(BETWEEN_HOSTS.latency, nic))


def known_machines() -> dict[str, Machine]:
    """Returns the machines by name.

    Example:
        >>> list(known_machines())
        ['p4d', 'a100', 'h100', 'h200']
    """
    found = (
        _gpus("p4d", 40 * _GB, 312e12, 19.5e12, 1.555e12, 300e9, 6.25e9),
        _gpus("a100", 80 * _GB, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        _gpus("h100", 80 * _GB, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        _gpus("h200", 141 * _GB, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    )
    return {each.name: each for each in found}
