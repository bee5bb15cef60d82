"""Warnings about mesh axes of the model that cross hosts, each given once."""

from collections.abc import Collection, Sequence

from shardcore.domain.cost.collective_cost import crossing_warning
from shardcore.ports.world import World
from shardcore.reporting.logs import log_of

logger = log_of("session")


def warn_of_hosts(
    world: World, batch_axes: Collection[str], hosts: Sequence[str], warned: set[str]
) -> None:
    """Warns of each axis that does not shard the batch and crosses hosts.

    Args:
        world: The mesh and its processes.
        batch_axes: The axes that shard the batch. They may cross hosts: what moves along them can
            be sent beside the computation.
        hosts: The host of each process; empty if it is not known.
        warned: The warnings that were given, to which this adds.
    """
    for axis in world.mesh.axis_names if hosts else ():
        warning = crossing_warning(world.mesh, axis, world.processes, hosts)
        if warning and axis not in batch_axes and warning not in warned:
            warned.add(warning)
            logger.warning(warning)
