"""Random generators that take their seed from a tensor: the seed is part of the tape."""

import torch

from shardcore.adapters.capture.recorder import recording


def seeded(seed: torch.Tensor) -> torch.Generator:
    """A generator with the value of `seed`, as `keras.random` makes it on torch."""
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed) & 0xFFFFFFFF)
    return generator


def generator(seed: torch.Tensor) -> torch.Generator:
    """As `seeded`; in a recording the reading of the seed is a call like any other."""
    recorder = recording()
    if recorder is None:
        return seeded(seed)
    with recorder.unheard():
        made = seeded(seed)
    recorder.note(seeded, (seed,), {}, made)
    return made
