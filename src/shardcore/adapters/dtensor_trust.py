"""Which operators of DTensor can be trusted under which placements, and what is done if not.

Known for torch 2.13, found by the matrix of `keras.ops` and `keras.layers`. An operator that is
not trusted is run on whole operands; what it writes in place is cut into parts again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import _pytree as pytree

from shardcore.adapters import torch_compat

aten = torch.ops.aten

Predicate = Callable[[tuple[Any, ...]], bool]


def any_split(args: tuple[Any, ...]) -> bool:
    """Whether an operand is split or pending."""
    return any(
        isinstance(leaf, DTensor) and not all(map(Replicate.is_replicate, leaf.placements))
        for leaf in pytree.tree_leaves(args)
    )


def mean_of_split(args: tuple[Any, ...]) -> bool:
    """A mean loss over split operands: DTensor divides by the size of a part."""
    return any_split(args)


# Operators whose result DTensor gets wrong (or that die on some ranks only), with the placements
# under which it does.
DISTRUSTED: dict[Any, Predicate] = {}
