"""The global state of Keras: distribution, device, names, seeds."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy
import torch
from keras.src import backend, optimizers
from keras.src.backend.common import global_state
from keras.src.backend.torch import core as torch_core
from keras.src.distribution import distribution_lib
from keras.src.random import seed_generator
from keras.src.utils import rng_utils

CURRENT_DISTRIBUTION: str = distribution_lib.GLOBAL_ATTRIBUTE_NAME


def current_distribution() -> Any:
    """Returns the distribution that is set on this thread, or None."""
    return global_state.get_global_attribute(CURRENT_DISTRIBUTION)


def forget_distribution() -> None:
    """Unsets the distribution of this thread."""
    global_state.set_global_attribute(CURRENT_DISTRIBUTION, None)


@contextmanager
def without_distribution() -> Iterator[None]:
    """Opens a context in which this thread has no distribution."""
    distribution = current_distribution()
    forget_distribution()
    try:
        yield
    finally:
        global_state.set_global_attribute(CURRENT_DISTRIBUTION, distribution)


def torch_device() -> Any:
    """Returns the device on which Keras creates tensors."""
    return torch_core.get_device()


def is_symbolic() -> bool:
    """Returns whether Keras is inferring shapes, on the meta device."""
    return str(torch_core.get_device()) == "meta"


def is_made_by_optimizer() -> bool:
    """Returns whether the variable in creation is an optimizer's, by its name scope."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, optimizers.Optimizer)


def settings() -> tuple[Any, ...]:
    """Returns the settings of `keras.config` that layers and losses read in their calls."""
    attention = global_state.get_global_attribute("flash_attention")
    return backend.epsilon(), backend.floatx(), backend.image_data_format(), attention


def user_seed() -> int | None:
    """Returns the seed of `keras.utils.set_random_seed`, None if it was not called."""
    seed: int | None = rng_utils.get_random_seed()
    return seed


def global_seed() -> Any:
    """Returns the state of the generator of random layers without a seed; None before its use."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def draw_seed(seed: Any) -> tuple[Any, Any]:
    """Returns both halves of the next seed of `seed`, as tensors."""
    first, second = seed_generator.draw_seed(seed)
    return first, second


@contextmanager
def unnoticed() -> Iterator[None]:
    """Restores Keras' counts of names and its seeds at the end, for a model that is built inside.

    No distribution may be set.
    """
    before = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    names = copy(before.get("object_name_uids"))
    global_state.set_global_attribute("object_name_uids", names)
    try:
        with generators_kept():
            yield
    finally:
        now = vars(global_state.GLOBAL_STATE_TRACKER)  # another generator after a clear_session()
        now.clear()
        now.update(before)


@contextmanager
def generators_kept(gpus: Sequence[int] | None = None) -> Iterator[None]:
    """Restores the generators of Python, NumPy and torch at the end."""
    drawn = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
