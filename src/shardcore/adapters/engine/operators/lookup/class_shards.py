"""What one rank does of a loss that looks up classes, of which it has some.

A sample whose class is with another rank counts nothing here. One whose class is with none, and is
not the class to ignore, is not a number: one device raises, which would need a look at the values.
"""

import torch


def nll_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    numbers: torch.Tensor,
    weight: torch.Tensor | None,
    classes: int,
    ignored: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and its weight.

    Args:
        x: Logarithms, of samples, the classes of this rank, and whatever else.
        target: The class of each sample.
        numbers: Which classes these are, in order.
        weight: The weight of each of them.
        classes: How many there are on all ranks.
        ignored: The class of samples that do not count.
    """
    here, place = _places(target, numbers, ignored)
    picked = -x.gather(1, place.unsqueeze(1)).squeeze(1)
    if weight is not None:
        picked = picked * weight[place]
    counts = target != ignored
    losses = torch.where(here, picked, torch.zeros_like(picked))
    losses = losses.masked_fill(counts & ((target < 0) | (target >= classes)), torch.nan)
    if weight is None:
        return losses, counts.to(x.dtype)
    return losses, torch.where(here, weight[place], torch.zeros_like(weight[place]))


def nll_loss_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    numbers: torch.Tensor,
    weight: torch.Tensor | None,
    ignored: int,
) -> torch.Tensor:
    """The gradient of `x`, where `gradient` is that of each sample's loss, or of all."""
    here, place = _places(target, numbers, ignored)
    each = -gradient if weight is None else -gradient * weight[place]
    each = torch.where(here, each, torch.zeros_like(each)).to(x.dtype)
    return torch.zeros_like(x).scatter_(1, place.unsqueeze(1), each.unsqueeze(1))


def _places(
    target: torch.Tensor, numbers: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sample, whether its class is here and counts, and where it is."""
    here, place = places(target, numbers)
    return here & (target != ignored), place


def places(wanted: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each of `wanted` is among the sorted `numbers`, and where; anywhere, if it is not.

    A rank has several pieces of a dim that is split within its stretches.
    """
    place = torch.searchsorted(numbers, wanted.to(numbers.dtype)).clamp(max=len(numbers) - 1)
    return numbers[place] == wanted, place
