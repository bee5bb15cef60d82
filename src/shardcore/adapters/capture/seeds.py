"""Random draws that take their seed from a tensor: the seed is part of the tape."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from shardcore.adapters.capture.recorder import recording
from shardcore.adapters.torch_compat.interpreter import seeded_generator


def generator(seed: torch.Tensor) -> torch.Generator:
    """A generator with the value of `seed`: in a recording, a call like any other."""
    recorder = recording()
    if recorder is None:
        return seeded_generator(seed)
    with recorder.unheard():
        made = seeded_generator(seed)
    recorder.note(seeded_generator, (seed,), {}, made)
    return made


def drawn(draw: Callable[..., Any], seed: torch.Tensor, operands: dict[str, Any]) -> Any:
    """What `draw` gives for the number in `seed`: one call of the recording."""
    recorder = recording()
    assert recorder is not None, "no step is being recorded"
    return recorder.at_once(_seeded_by_tensor(draw), (seed,), operands)


@cache
def _seeded_by_tensor(draw: Callable[..., Any]) -> Callable[..., Any]:
    """`draw`, its seed in a tensor: one function for each, so that recordings can be compared."""

    @wraps(draw)
    def draw_with(seed: torch.Tensor, **operands: Any) -> Any:
        return draw(**operands, seed=int(seed) & 0xFFFFFFFF)

    return draw_with
