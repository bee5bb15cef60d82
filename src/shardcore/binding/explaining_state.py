"""What a step changes, put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from shardcore.binding import agreement, seams, torch_modules
from shardcore.binding.session import Session


@contextmanager
def as_before(model: Any, session: Session | None) -> Iterator[None]:
    """After it variables, gradients, buffers and generators are as they were, to the last bit."""
    variables = list(agreement.variables_of(model))
    seed = seams.global_seed()
    tensors = [each._value for each in [*variables, *([] if seed is None else [seed])]]
    tensors += torch_modules.buffers(model)
    kept = [each.detach().clone() for each in tensors]
    gradients = [(each, each.grad) for each in tensors if each.requires_grad]
    drawn = random.getstate(), numpy.random.get_state()
    for tensor, _ in gradients:
        tensor.grad = None
    try:
        with torch.random.fork_rng(_devices(tensors)):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                _write(tensor, value, session)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])


def _write(tensor: Any, value: Any, session: Session | None) -> None:
    if session is not None and session.strategy.owns(tensor):
        session.strategy.assign(tensor, value)
    else:
        tensor.copy_(value)


def _devices(tensors: list[Any]) -> list[int]:
    """The GPUs whose generators may be drawn from."""
    found = {each.device.index or 0 for each in tensors if each.device.type == "cuda"}
    return sorted(found)
