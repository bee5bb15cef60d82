"""The cost of a collective in seconds, and the hosts that the ranks of a mesh axis are on.

The bytes are those that a rank sends over the link of a mesh axis, by bandwidth-optimal algorithms:
see `domain.engine.redistribution`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Literal, TypeAlias

import attrs

from shardcore.domain.errors import MeshError
from shardcore.domain.layouts.mesh import Mesh

Kind: TypeAlias = Literal["slice", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"]
# The kinds of collectives that may have a bandwidth other than that of an all-reduce.
KINDS = ("all_gather", "all_to_all", "reduce_scatter", "send")


@attrs.frozen
class Link:
    """The latency and the bandwidth between the ranks along a mesh axis.

    Args:
        latency: The seconds that a collective takes to start.
        bandwidth: The bytes that a rank sends in a second in an all-reduce.
        bandwidths: The bandwidth of kinds of collectives that differ from it: the bytes that a ring
            sends, divided by the time that the library takes.

    Raises:
        MeshError: If one of them is not a positive number, or a kind is unknown.

    Example:
        >>> link = Link(latency=1e-5, bandwidth=1e9, bandwidths={"reduce_scatter": 5e8})
        >>> link.seconds(1_000_000), link.seconds(1_000_000, "reduce_scatter")
        (0.00101, 0.00201)
    """

    latency: float = 10e-6
    bandwidth: float = 13e9
    # Not in the hash, which a dictionary does not have.
    bandwidths: Mapping[str, float] = attrs.field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        _check_positive("latency", self.latency, "seconds")
        _check_positive("bandwidth", self.bandwidth, "bytes a second")
        if not isinstance(self.bandwidths, Mapping) or not set(self.bandwidths) <= set(KINDS):
            raise MeshError(
                f"The bandwidths of a link are given by kind, one of {', '.join(KINDS)}: got "
                f"{self.bandwidths!r}. That of an all_reduce is given as bandwidth.",
                got=repr(self.bandwidths),
            )
        for kind, value in self.bandwidths.items():
            _check_positive(f"bandwidth of {kind!r}", value, "bytes a second")

    def bandwidth_of(self, kind: str) -> float:
        """The bytes that a rank sends in a second in a collective of this kind."""
        return self.bandwidths.get(kind, self.bandwidth)

    def seconds(self, sent: float, kind: str = "all_reduce") -> float:
        """The seconds of a collective in which each rank sends `sent` bytes."""
        return self.latency + sent / self.bandwidth_of(kind)

    def times(self, count: int) -> "Link":
        """Builds a link with the latency of this one and the bandwidth of `count` such links."""
        bandwidths = {kind: count * bandwidth for kind, bandwidth in self.bandwidths.items()}
        return Link(self.latency, count * self.bandwidth, bandwidths)


def slowest(links: Iterable[Link]) -> Link:
    """Builds a link with the highest latency and, by kind, the lowest bandwidth of `links`.

    Example:
        >>> slowest([Link(1.0, 10.0), Link(2.0, 30.0, {"all_gather": 5.0})])
        Link(latency=2.0, bandwidth=10.0, bandwidths={'all_gather': 5.0})
    """
    all_links = list(links)
    kinds = {kind for link in all_links for kind in link.bandwidths}
    return Link(
        max(link.latency for link in all_links),
        min(link.bandwidth for link in all_links),
        {kind: min(link.bandwidth_of(kind) for link in all_links) for kind in sorted(kinds)},
    )


def _check_positive(name: str, value: object, unit: str) -> None:
    if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise MeshError(
            f"A link has a {name} above 0, in {unit}, got {value!r}: the default is "
            "Link(latency=10e-6, bandwidth=13e9).",
            got=repr(value),
        )


# Not measured: the ratios decide, and ranks that measured for themselves would plan different
# collectives (ADR 26).
WITHIN_A_HOST = Link()
BETWEEN_HOSTS = Link(latency=25e-6, bandwidth=5e9)


def _pairs(
    links: Mapping[str, Link] | tuple[tuple[str, Link], ...],
) -> tuple[tuple[str, Link], ...]:
    return tuple(links.items()) if isinstance(links, Mapping) else tuple(links)


@attrs.frozen(cache_hash=True)
class Costs:
    """The links of a mesh, and the speed of a rank.

    Example:
        >>> costs = Costs({"data": Link(latency=1e-3)})
        >>> costs.link("data").latency, costs.link("model").latency
        (0.001, 1e-05)
    """

    # The link of each mesh axis. An axis without one has the link within a host.
    links: tuple[tuple[str, Link], ...] = attrs.field(default=(), converter=_pairs)
    multiplications: float = 13e12  # the multiplications that a rank computes in a second

    def link(self, axis: str) -> Link:
        """The given link of `axis`, by default that within a host."""
        return dict(self.links).get(axis, WITHIN_A_HOST)

    def collective(self, kind: Kind | None, axis: str, ranks: int, held: float) -> float:
        """Computes the seconds of a collective along an axis with `ranks`, 0 if it sends nothing.

        These ranks hold the bytes `held` together; of partial values, each of them does.
        """
        if kind is None or kind == "slice" or ranks == 1:
            return 0.0
        return self.link(axis).seconds(bytes_sent(kind, ranks, held), kind)


def bytes_sent(kind: str, ranks: int, held: float) -> float:
    """Computes the bytes that each of `ranks` sends of `held` in all, for even shards.

    Example:
        >>> [bytes_sent(kind, 4, 1600) for kind in ("all_gather", "all_to_all", "all_reduce")]
        [1200.0, 300.0, 2400.0]
        >>> bytes_sent("send", 4, 1600)
        400.0
    """
    sent, shard = held * (ranks - 1) / ranks, held / ranks
    others = {"slice": 0.0, "all_reduce": 2 * sent, "all_to_all": sent / ranks, "send": shard}
    return others.get(kind, sent)


def bytes_sent_of(kind: str, ranks: int, operand_bytes: int) -> int:
    """Computes `bytes_sent` of a rank by its operand: its shard, or the full tensor."""
    shards = ranks if kind in ("all_gather", "all_to_all", "send") else 1
    return round(bytes_sent(kind, ranks, operand_bytes * shards))


def links_of(
    groups: Mapping[str, tuple[tuple[int, ...], ...]],
    hosts: tuple[str, ...],
    given: Mapping[str, Link],
) -> tuple[tuple[str, Link], ...]:
    """Chooses the link of each mesh axis: the given one, else that within or between hosts.

    `groups` has, per axis, the groups of processes along it; `hosts` the host of each process.

    Raises:
        MeshError: If `given` names an axis that the mesh does not have.

    Example:
        >>> groups = {"data": ((0, 2), (1, 3)), "model": ((0, 1), (2, 3))}
        >>> links = dict(links_of(groups, ("a", "a", "b", "b"), {}))
        >>> links["model"] == WITHIN_A_HOST, links["data"] == BETWEEN_HOSTS
        (True, True)
    """
    unknown = sorted(given.keys() - groups.keys())
    if unknown:
        raise MeshError(
            f"links= names the axes {unknown}, but the mesh has {list(groups)}: give "
            "links={axis: shardcore.Link(latency=seconds, bandwidth=bytes_a_second)}."
        )
    return tuple((axis, given.get(axis, _by_hosts(group, hosts))) for axis, group in groups.items())


def _by_hosts(groups: tuple[tuple[int, ...], ...], hosts: tuple[str, ...]) -> Link:
    shared = all(len({hosts[process] for process in group}) == 1 for group in groups)
    return WITHIN_A_HOST if shared else BETWEEN_HOSTS


# An activation of 1,024 tokens of width 4,096 in float32.
_EXAMPLE_BYTES = 16 * 2**20


def ranks_by_host(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Groups ranks by their hosts.

    Example:
        >>> ranks_by_host(("a", "a", "b"))
        {'a': [0, 1], 'b': [2]}
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def crossing_warning(mesh: Mesh, axis: str, processes: Sequence[int], hosts: Sequence[str]) -> str:
    """Writes a warning about an axis whose groups are on several hosts each; empty for another.

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
