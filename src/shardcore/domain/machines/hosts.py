"""The hosts of the ranks of a job, and mesh axes that cross them."""

import math
from collections.abc import Sequence

from shardcore.domain.machines.collective_cost import BETWEEN_HOSTS, WITHIN_A_HOST, bytes_sent
from shardcore.domain.mesh import Mesh

# An activation of 1,024 tokens of width 4,096 in float32.
_EXAMPLE_BYTES = 16 * 2**20


def ranks_by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Returns the ranks of each host, given the host of each rank.

    Example:
        >>> ranks_by_host(("a", "a", "b"))
        {'a': [0, 1], 'b': [2]}
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def crossing_warning(mesh: Mesh, axis: str, processes: Sequence[int], hosts: Sequence[str]) -> str:
    """Returns a warning about an axis whose groups are on several hosts each; empty for another.

    Args:
        mesh: The mesh.
        axis: One of its axes, over which the model is sharded.
        processes: The process at each position of the mesh.
        hosts: The host of each process.

    Example:
        >>> crossing_warning(Mesh((2, 2), ("data", "model")), "model", range(4), "aabb")
        ''
        >>> crossing_warning(Mesh((2, 2), ("model", "data")), "model", range(4), "aabb")[:60]
        "Mesh axis 'model' crosses hosts: its ranks 0, 2 are on a, b."
    """
    for positions in mesh.axis_groups(axis):
        group = [processes[position] for position in positions]
        names = list(dict.fromkeys(hosts[process] for process in group))
        if len(names) > 1:
            sent = bytes_sent("all_reduce", len(group), _EXAMPLE_BYTES)
            between, within = (link.seconds(sent) * 1e3 for link in (BETWEEN_HOSTS, WITHIN_A_HOST))
            together = math.gcd(*map(len, ranks_by_host(hosts).values()))
            advice = (
                f"Make it the last axis of the mesh, with a size that divides {together}, the "
                "ranks of a host."
                if together > 1
                else "Shard the batch over it instead: no axis fits into each host here."
            )
            return (
                f"Mesh axis {axis!r} crosses hosts: its ranks {', '.join(map(str, group))} are on "
                f"{', '.join(names)}. By the links that shardcore assumes, an all-reduce of 16 MiB "
                f"along it takes {between:.1f} ms, and {within:.1f} ms within a host. {advice}"
            )
    return ""
