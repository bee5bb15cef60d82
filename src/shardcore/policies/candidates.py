"""Meshes and policies for a number of devices: the choice that policy `auto` has."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from shardcore.domain.layouts.mesh import Mesh

_SEQUENCE_AND_MODEL = {"axis": "seq", "tensor": "model"}


@attrs.frozen
class Candidate:
    """A policy and a mesh for it.

    Args:
        policy: The name of the policy.
        mesh: The mesh.
        batch_ndim: The number of axes, from the first, that shard the batch.
        options: The options of the policy.
    """

    policy: str
    mesh: Mesh
    batch_ndim: int = 1
    options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch."""
        return self.mesh.axis_names[: self.batch_ndim]

    @property
    def batch_parts(self) -> int:
        """The number of parts of the batch."""
        return self.mesh.size_along(self.batch_axes)

    @property
    def small(self) -> Mesh:
        """The mesh with at most two ranks along each axis that shards the batch.

        Its ranks do what those of the large mesh do with as many rows (`domain.cost.rank_step`).
        """
        few = [min(size, 2) for size in self.mesh.shape[: self.batch_ndim]]
        return Mesh((*few, *self.mesh.shape[self.batch_ndim :]), self.mesh.axis_names)

    def __str__(self) -> str:
        return f"{self.policy} {self.mesh}"


def candidates(devices: int, host: int) -> tuple[Candidate, ...]:
    """Lists all meshes of `devices`, `host` of which are in a host, with the policies for them.

    The axes of the model and of sequences, or that of experts, are the innermost, and stay in a
    host. Experts are also sharded over all devices.

    Example:
        >>> for candidate in candidates(4, host=2):
        ...     print(candidate)
        data_parallel (data=4)
        fully_sharded (data=4)
        expert_parallel (data=4)
        tensor_parallel (data=2, model=2)
        sequence_parallel (data=2, model=2)
        context_parallel (data=2, seq=2)
        expert_parallel (data=2, expert=2)
        hybrid_sharded (replica=2, shard=2)
        hybrid_sharded (replica=1, shard=2, model=2)
    """
    return tuple(_all(devices, host))


def _all(devices: int, host: int) -> Iterator[Candidate]:
    yield Candidate("data_parallel", Mesh((devices,), ("data",)))
    if devices > 1:
        yield Candidate("fully_sharded", Mesh((devices,), ("data",)))
        yield Candidate("expert_parallel", Mesh((devices,), ("data",)))
    models = [size for size in _divisors(devices) if size > 1 and host % size == 0]
    for model in models:
        mesh = Mesh((devices // model, model), ("data", "model"))
        yield Candidate("tensor_parallel", mesh)
        yield Candidate("sequence_parallel", mesh)
        yield Candidate("context_parallel", Mesh(mesh.shape, ("data", "seq")))
        for seq in _divisors(host // model)[1:]:
            if devices % (model * seq) == 0:
                both = Mesh((devices // model // seq, seq, model), ("data", "seq", "model"))
                yield Candidate("context_parallel", both, options=_SEQUENCE_AND_MODEL)
        if model < devices:  # else it is the same as on one axis
            yield Candidate("expert_parallel", Mesh(mesh.shape, ("data", "expert")), 2)
    for model in (1, *models):
        for shard in _divisors(devices // model)[1:]:
            replica = devices // model // shard
            if model > 1:
                axes = ("replica", "shard", "model")
                yield Candidate("hybrid_sharded", Mesh((replica, shard, model), axes), 2)
            elif replica > 1:  # of one group it is fully_sharded
                yield Candidate("hybrid_sharded", Mesh((replica, shard), ("replica", "shard")), 2)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
