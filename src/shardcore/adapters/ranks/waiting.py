"""Waits for collectives of tensors, and names the ranks that did not come."""

import torch

from shardcore.adapters.ranks.failure.heartbeats import describe_awaited
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.adapters.source_line import source_line
from shardcore.adapters.torch_private import collectives
from shardcore.domain.errors import RankMismatchError, text_of


def wait(value: torch.Tensor, collective: str) -> torch.Tensor:
    """Waits for the collective, named `collective`, that computes `value`; returns `value`.

    Raises:
        RankMismatchError: If a rank did not come within the timeout of the process group.
    """
    try:
        return collectives.wait(value)
    except RuntimeError as error:
        raise_if_late(error, f"{collective} ({source_line()})")
        raise


def raise_if_late(error: Exception, collective: str) -> None:
    """Raises the error of a rank that waited in vain in `collective`, if that is what `error` says.

    Raises:
        RankMismatchError: It names the ranks that did not come.
    """
    text = text_of(error).lower()
    if "gloo" in text and "timed out" in text and not process_group.is_simulated():
        raise RankMismatchError(
            f"Rank {process_group.rank()} waited {process_group.seconds(None):.0f} seconds in "
            f"{collective} for {describe_awaited(exchange.store_for_thread)}. "
            f"If it computes for so long, set {process_group.TIMEOUT_VARIABLE} to more seconds."
        ) from error
