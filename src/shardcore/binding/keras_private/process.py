"""The state of the process: distribution, device, seeds, settings, messages."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import keras
import numpy
import torch
from keras.src import optimizers
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.torch import random as torch_random
from keras.src.callbacks import remote_monitor
from keras.src.distribution import distribution_lib
from keras.src.random import seed_generator
from keras.src.random.seed_generator import draw_seed as draw_seed
from keras.src.utils import io_utils
from keras.src.utils.rng_utils import get_random_seed as get_random_seed

from shardcore.binding.keras_private.lines import find

_get_device = find("keras.src.backend.torch.core:get_device")


CURRENT_DISTRIBUTION: str = distribution_lib.GLOBAL_ATTRIBUTE_NAME


@contextmanager
def without_distribution() -> Iterator[None]:
    """Opens a context in which this thread has no distribution."""
    distribution = distribution_lib.distribution()
    distribution_lib.set_distribution(None)
    try:
        yield
    finally:
        distribution_lib.set_distribution(distribution)


def torch_device() -> Any:
    """Returns the device on which Keras creates tensors."""
    return _get_device()


def generator_of(seed: object) -> Any:
    """Returns torch's generator for the next draw with `seed`; None where nothing has values."""
    return torch_random.torch_seed_generator(seed)


def is_symbolic() -> bool:
    """Returns whether Keras is inferring shapes, on the meta device."""
    return str(_get_device()) == "meta"


def is_symbolic_with_values() -> bool:
    """Returns whether Keras is inferring shapes by tensors, as the meta device has failed."""
    return in_symbolic_scope() and not is_symbolic()


def is_made_by_optimizer() -> bool:
    """Returns whether the variable in creation is an optimizer's, by its name scope."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, optimizers.Optimizer)


# What Keras itself has in its global state: scopes of the call that runs, and `settings()`.
_OWN_STATE = frozenset(
    {
        *("autocast_scope", "current_call_ctx", "custom_objects_scope_dict", "distribution"),
        *("dtype_policy", "flash_attention", "global_random_seed", "global_seed_generator"),
        *("in_tf_graph_scope", "interactive_logging", "name_scope_stack", "nnx_enabled"),
        *("remat_scope_stack", "safe_mode_saving", "stateless_scope", "symbolic_scope"),
        *("torch_device", "traceback_filtering", "tracking_on", "uninitialized_variables"),
        "use_legacy_config",
    }
)


def global_state_of(names: frozenset[str]) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns the global state of Keras on this thread, and which of `names` others have set."""
    attributes: dict[str, Any] = vars(global_state.GLOBAL_STATE_TRACKER)
    return attributes, (names & attributes.keys()) - _OWN_STATE


def settings() -> tuple[Any, ...]:
    """Returns the settings of `keras.config` that layers and losses read in their calls."""
    attention = global_state.get_global_attribute("flash_attention")
    settings = keras.config
    return (
        *(settings.epsilon(), settings.floatx(), settings.image_data_format(), attention),
        *(settings.dtype_policy().name, settings.is_traceback_filtering_enabled()),
        settings.is_interactive_logging_enabled(),
    )


def registered_objects() -> dict[str, Any]:
    """Returns the classes and functions that Keras finds by name."""
    return dict(keras.saving.get_custom_objects())


def global_seed() -> Any:
    """Returns the state of the generator of random layers without a seed; None before its use."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_global_seed() -> None:
    """Makes the generator of random layers without a seed, if there is none."""
    seed_generator.global_seed_generator()


@contextmanager
def restored_counts_and_seeds() -> Iterator[None]:
    """Restores Keras' counts of names and its seeds at the end, for a model that is built inside.

    No distribution may be set.
    """
    before = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    # Inside, Keras changes copies: of its counts of names, and of its list of variables to come.
    containers = {
        key: copy(container)
        for key, container in before.items()
        if isinstance(container, list | dict)
    }
    vars(global_state.GLOBAL_STATE_TRACKER).update(containers)
    try:
        with restored_generators():
            yield
    finally:
        now = vars(global_state.GLOBAL_STATE_TRACKER)  # another generator after a clear_session()
        now.clear()
        now.update(before)


@contextmanager
def restored_generators(gpus: Sequence[int] | None = None) -> Iterator[None]:
    """Restores the generators of Python, NumPy and torch at the end."""
    drawn = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])


def can_send() -> bool:
    """Returns whether `requests`, which `RemoteMonitor` needs, is installed."""
    return remote_monitor.requests is not None


def print_message(message: str) -> None:
    """Prints as Keras does, to standard output or to its log."""
    io_utils.print_msg(message)
