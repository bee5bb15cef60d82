"""The wait for a collective, whose error names the ranks that did not come."""

import torch

from shardcore.adapters.capture.places import place
from shardcore.adapters.failure import heartbeats
from shardcore.adapters.torch_private import collectives


def wait(value: torch.Tensor, collective: str) -> torch.Tensor:
    """Returns `value` after the collective of that name, which computes it, has finished.

    Raises:
        RankMismatchError: If a rank did not come within the timeout of the process group.
    """
    try:
        return collectives.wait(value)
    except RuntimeError as error:
        late = heartbeats.timed_out(error, f"{collective} ({place()})")
        if late is None:
            raise
        raise late from error
