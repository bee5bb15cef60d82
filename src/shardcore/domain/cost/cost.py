"""The predicted cost of a step: seconds of computing and of communication, and memory.

The time of Python, which starts the operators, is not in it.
"""

from collections.abc import Mapping

import attrs

from shardcore.domain.cost.collective_cost import bytes_sent, slowest
from shardcore.domain.cost.events import Kind
from shardcore.domain.cost.larger_mesh import RankCollective, RankStep
from shardcore.domain.cost.machine import Machine

# The kinds of collectives in which the operand of a rank is its shard of the tensor.
_OF_SHARDS = ("all_gather", "all_to_all", "send")


@attrs.frozen
class StepCost:
    """The predicted cost of a step for one rank.

    Args:
        compute: The seconds of its operators.
        communication: The seconds of its collectives, by mesh axis.
        exposed: The seconds of collectives during which it computes nothing.
        waited: Those of collectives for which it waits in any case.
        sent: The bytes that it sends, by mesh axis.
        memory: The bytes by kind at the highest point.
    """

    compute: float
    communication: Mapping[str, float]
    exposed: float
    waited: float
    sent: Mapping[str, int]
    memory: Mapping[Kind, int]

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.compute + self.exposed

    @property
    def peak(self) -> int:
        """The bytes at the highest point."""
        return sum(self.memory.values())


def cost_of(step: RankStep, machine: Machine) -> StepCost:
    """Returns the predicted cost of a step on a machine.

    An operator takes the longer of its operations and its bytes of memory (`Speed.seconds`). A
    collective takes the latency of its link, once, and the time in which a rank sends its bytes.
    These are the bytes of a ring, which no algorithm goes below: `2B(n-1)/n` in an all-reduce, half
    of it in an all-gather or a reduce-scatter (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69 (2),
    2009; `bytes_sent`). Where a library takes longer, the link has a lower bandwidth for that kind.
    A collective over several axes has the lowest bandwidth of their links.

    The step waits for collectives of activations. Those of weights and gradients are hidden behind
    its operators, as far as these last and the machine hides them: a captured step starts them
    early and waits late. The rest is exposed.

    Example:
        >>> from shardcore.domain.cost.collective_cost import Link
        >>> from shardcore.domain.cost.machine import Speed
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.cost.events import Work
        >>> link = Link(latency=0.5, bandwidth=1000)
        >>> machine = Machine("toy", 2, 10**6, {"float32": Speed(100, 100)}, link, link)
        >>> work = Work("aten.mm.default", "float32", flops=300, bytes=100, updates=False)
        >>> moved = RankCollective("all_reduce", ("data",), operand_bytes=2000, waits=True)
        >>> step = RankStep(Mesh((2,), ("data",)), (work,), (moved,), {"variables": 8})
        >>> cost = cost_of(step, machine)
        >>> cost.compute, dict(cost.communication), cost.seconds
        (3.0, {'data': 2.5}, 5.5)
    """
    compute = sum(
        work.times * machine.speed(work.dtype).seconds(work.flops, work.bytes) for work in step.work
    )
    links = machine.links(step.mesh)
    communication: dict[str, float] = {}
    sent: dict[str, int] = {}
    waited = hidden = 0.0
    for collective in step.collectives:
        axis, ranks = ", ".join(collective.axes), step.mesh.size_along(collective.axes)
        size = _sent(collective, ranks)
        link = slowest(links[axis] for axis in collective.axes or links)  # of all for unknown ranks
        seconds = collective.times * link.seconds(size, collective.kind)
        communication[axis] = communication.get(axis, 0.0) + seconds
        sent[axis] = sent.get(axis, 0) + collective.times * size
        if collective.waits:
            waited += seconds
        else:
            hidden += seconds
    exposed = waited + hidden - min(hidden * machine.hidden, compute)
    return StepCost(compute, communication, exposed, waited, sent, step.memory)


def _sent(moved: RankCollective, ranks: int) -> int:
    """Returns the bytes that a rank sends in a collective."""
    shards = ranks if moved.kind in _OF_SHARDS else 1
    return round(bytes_sent(moved.kind, ranks, moved.operand_bytes * shards))
