"""What one mesh axis does to a tensor: copy it, split one dim of it, or leave it to be reduced."""

from operator import index
from typing import Literal, TypeAlias, get_args

import attrs

from shardcore.domain.errors import LayoutError

ReduceOp: TypeAlias = Literal["sum", "avg", "max", "min", "product"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


def _dim(value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise LayoutError(f"Shard takes the number of a tensor dim, got {value!r}.")
    return index(value)


def check_reduce_op(op: object) -> None:
    """Raise a LayoutError unless `op` is the name of a reduction."""
    if op not in REDUCE_OPS:
        raise LayoutError(f"Unknown reduction {op!r}: give one of {REDUCE_OPS}.")


@attrs.frozen
class Replicate:
    """Every rank along the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@attrs.frozen
class Shard:
    """The ranks along the axis hold consecutive chunks of tensor dim `dim`.

    Args:
        dim: The tensor dim that is split. A negative one counts from the end.

    Raises:
        LayoutError: If `dim` is not an integer.
    """

    dim: int = attrs.field(converter=_dim)

    def __str__(self) -> str:
        return f"S({self.dim})"


@attrs.frozen
class Partial:
    """The values along the axis still have to be reduced to give the tensor.

    Args:
        op: How they are reduced: "sum", "avg", "max", "min" or "product".

    Raises:
        LayoutError: If `op` is none of these.
    """

    op: ReduceOp = "sum"

    def __attrs_post_init__(self) -> None:
        check_reduce_op(self.op)

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial
