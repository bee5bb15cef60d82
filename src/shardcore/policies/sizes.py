"""What a split saves: the measure by which small variables stay whole."""

from collections.abc import Iterable

from shardcore.domain.mesh import Mesh
from shardcore.ports.model import VariableFacts
from shardcore.ports.policy import Choice, Spec

# Below this a collective costs its start, not its bytes: a start takes 10 to 50 µs, in which a
# link of 5 GB/s moves 50 to 250 KB. Biases and norms, which are many, are below it.
SMALL = 64 * 1024


def saves(variable: VariableFacts, spec: Spec, mesh: Mesh) -> int:
    """The bytes that every rank is spared, at the least."""
    return variable.bytes - variable.bytes_here(spec, mesh)


def whole(variable: VariableFacts) -> Spec:
    """The spec that splits nothing."""
    return (None,) * len(variable.shape)


def all_whole(variables: Iterable[VariableFacts], why: str) -> dict[str, Choice]:
    """The choices that split none of `variables`."""
    return {each.path: Choice(whole(each), f"whole: {why}") for each in variables}


def split(variable: VariableFacts, dim: int, axis: str) -> Spec:
    """The spec that splits one dim.

    Example:
        >>> split(VariableFacts("kernel", (4, 8)), -1, "model")
        (None, 'model')
    """
    spec: list[str | None] = [None] * len(variable.shape)
    spec[dim] = axis
    return tuple(spec)
