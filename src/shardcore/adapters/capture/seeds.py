"""Random draws that take their seed from a tensor: the seed is part of the tape."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from shardcore.adapters.capture.recorder import recording

_SEED_BITS = 0xFFFFFFFF


def seeded_generator(seed: torch.Tensor) -> torch.Generator:
    """A generator with the value of `seed`, as `keras.random` makes it on torch."""
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed) & _SEED_BITS)
    return generator


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
        return draw(**operands, seed=int(seed) & _SEED_BITS)

    return draw_with
