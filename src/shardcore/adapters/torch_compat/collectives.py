"""Collectives that are operators like any other: a recording of a step holds them.

torch 2.13: `torch.distributed` has these operators, and no public names for them; the functions
that have names keep a `Work` object, of which no recording knows. A result is to be waited for.
"""

import torch
import torch.distributed as dist


def all_reduce(value: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The reduction of `value`; `op` is "sum", "max", "min" or "product"."""
    found: torch.Tensor = torch.ops._c10d_functional.all_reduce(value, op, group.group_name)
    return found


def all_gather(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The values of all ranks of `group`, of one shape, joined along their first dim."""
    found: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(
        value.contiguous(), group.size(), group.group_name
    )
    return found


def reduce_scatter(value: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part, along the first dim, of the reduction of `value`."""
    found: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(
        value.contiguous(), op, group.size(), group.group_name
    )
    return found


def all_to_all(
    value: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """What all ranks send to this one, joined along the first dim.

    Args:
        value: What this rank sends, to the first rank first.
        received: How many rows come from each rank.
        sent: How many rows go to each rank.
        group: The ranks.
    """
    found: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        value.contiguous(), received, sent, group.group_name
    )
    return found


def wait(value: torch.Tensor) -> torch.Tensor:
    """`value`, once the collective that makes it is through."""
    found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return found
