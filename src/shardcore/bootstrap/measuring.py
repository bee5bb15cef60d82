"""The description of the machine at hand, which all ranks measure together."""

import socket
from collections.abc import Mapping, Sequence

from shardcore import bootstrap
from shardcore.domain.errors import MachineError
from shardcore.domain.machines.collective_cost import BETWEEN_HOSTS, WITHIN_A_HOST, slowest
from shardcore.domain.machines.machine import Machine, Speed


def measure(name: str) -> Machine:
    """Returns the description of this machine; if ranks differ, of the slowest one.

    A link that no two ranks use is a default of `collective_cost`. A collective: all ranks call it.

    Args:
        name: The name of the machine.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        MachineError: If the hosts have different numbers of ranks.
    """
    from shardcore.adapters.measurement import rates

    processes = bootstrap.installation().processes
    processes.initialize()
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(processes.gather(socket.gethostname())):
        hosts.setdefault(host, []).append(rank)
    sizes = {host: len(ranks) for host, ranks in hosts.items()}
    if len(set(sizes.values())) > 1:
        raise MachineError(
            f"Expected as many ranks on each host, got {sizes} (ranks by host): start torchrun "
            "with one --nproc_per_node on all hosts."
        )
    here = len(hosts[socket.gethostname()])
    near = list(hosts.values())
    far = [list(ranks) for ranks in zip(*near, strict=True)]
    within = rates.link(near) if here > 1 else WITHIN_A_HOST
    between = rates.link(far) if len(near) > 1 else BETWEEN_HOSTS
    hidden = rates.hidden() if processes.world_size > 1 else 1.0
    measured = processes.gather((rates.speeds(), rates.memory(here), within, between, hidden))
    speeds, memory, within_all, between_all, hidden_all = zip(*measured, strict=True)
    links = slowest(within_all), slowest(between_all)
    return Machine(name, here, min(memory), _slowest(speeds), *links, min(hidden_all))


def _slowest(speeds: Sequence[Mapping[str, Speed]]) -> dict[str, Speed]:
    return {
        dtype: Speed(
            min(rank_speeds[dtype].flops for rank_speeds in speeds),
            min(rank_speeds[dtype].bandwidth for rank_speeds in speeds),
        )
        for dtype in speeds[0]
    }
