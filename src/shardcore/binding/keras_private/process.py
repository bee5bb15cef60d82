"""The state of the process: distribution, device, seeds, settings, messages.

`KerasState` and `CustomObjects` are carried to a rank by the process that starts it.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import attrs
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
from keras.src.saving import object_registration
from keras.src.utils import io_utils, naming
from keras.src.utils.rng_utils import get_random_seed as get_random_seed

from shardcore.binding.keras_private.lines import find

_get_device = find("keras.src.backend.torch.core:get_device")
# What `keras.config` has a name and a `set_` for; Keras before 3.14 lacks some.
_SETTINGS = ("floatx", "epsilon", "image_data_format", "max_epochs", "max_steps_per_epoch")
# What a session of Keras notes, besides its policy, its distribution and its generator.
_NOTED = (
    *("global_random_seed", "flash_attention", "interactive_logging", "traceback_filtering"),
    "safe_mode_saving",
)
_NAMES, _POLICY, _SCOPE = "object_name_uids", "dtype_policy", "custom_objects_scope_dict"

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
    """The device on which Keras creates tensors on this thread."""
    return _get_device()


def generator_of(seed: object) -> Any:
    """Chooses torch's generator for the next draw with `seed`; None on the meta device."""
    return torch_random.torch_seed_generator(seed)


def is_symbolic() -> bool:
    """Tells whether Keras is inferring shapes, on the meta device."""
    return str(_get_device()) == "meta"


def is_symbolic_with_values() -> bool:
    """Tells whether Keras infers shapes by tensors, as the meta device has failed."""
    return in_symbolic_scope() and not is_symbolic()


def is_made_by_optimizer() -> bool:
    """Tells by its name scope whether the variable in creation is an optimizer's."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, optimizers.Optimizer)


# The module that numbers the names of objects.
NAMING = naming.__name__
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
    """The global state of Keras on this thread, and which of `names` may be those of others."""
    attributes: dict[str, Any] = vars(global_state.GLOBAL_STATE_TRACKER)
    return attributes, names - _OWN_STATE


def settings() -> tuple[Any, ...]:
    """The settings of `keras.config` that layers and losses read in their calls."""
    attention = global_state.get_global_attribute("flash_attention")
    settings = keras.config
    return (
        *(settings.epsilon(), settings.floatx(), settings.image_data_format(), attention),
        *(settings.dtype_policy().name, settings.is_traceback_filtering_enabled()),
        *(settings.is_interactive_logging_enabled(), settings.max_epochs()),
        settings.max_steps_per_epoch(),
    )


def registered_objects() -> dict[str, Any]:
    """Copies the classes and functions that Keras finds by name."""
    return dict(keras.saving.get_custom_objects())


def global_seed() -> Any:
    """The state of the generator of random layers without a seed; None before its use."""
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
    """Tells whether `requests`, which `RemoteMonitor` needs, is installed."""
    return remote_monitor.requests is not None


def print_message(message: str) -> None:
    """Prints as Keras does, to standard output or to its log."""
    io_utils.print_msg(message)


@attrs.frozen(eq=False)
class KerasState:
    """Settings, the dtype policy and the seeds of Keras, for a new interpreter (ADR 52).

    Args:
        settings: The values of `keras.config`, by name.
        noted: What the session has noted, by name.
        policy: The configuration of the dtype policy; None if none is set.
        drawn: The state of the generator of random layers; None before its use.
    """

    settings: dict[str, Any]
    noted: dict[str, Any]
    policy: Any
    drawn: Any

    @classmethod
    def now(cls, *, names: bool = False) -> "KerasState":
        """Reads the state of this process; `names`: with the counts of names of layers."""
        names_noted = (*_NOTED, _NAMES) if names else _NOTED
        noted = {name: global_state.get_global_attribute(name) for name in names_noted}
        policy = global_state.get_global_attribute(_POLICY)
        generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
        return cls(
            {
                name: getattr(keras.config, name)()
                for name in _SETTINGS
                if hasattr(keras.config, f"set_{name}")
            },
            {name: value for name, value in noted.items() if value is not None},
            None if policy is None else keras.saving.serialize_keras_object(policy),
            None if generator is None else keras.ops.convert_to_numpy(generator.state),
        )

    def restore_settings(self) -> None:
        """Restores what modules may read when they are imported."""
        for name, value in self.settings.items():
            getattr(keras.config, f"set_{name}")(value)

    def restore(self) -> None:
        """Restores all of it. Custom objects are restored before: a policy may be one."""
        self.restore_settings()
        for name, value in self.noted.items():
            global_state.set_global_attribute(name, value)
        if self.policy is not None:
            keras.config.set_dtype_policy(keras.saving.deserialize_keras_object(self.policy))
        if self.drawn is not None:
            seed_generator.global_seed_generator().state.assign(self.drawn)


@attrs.frozen(eq=False)
class CustomObjects:
    """Objects that are registered with Keras by a name, or named by the scope around this.

    Args:
        by_name: The registered objects.
        names: Each object that has a name, with the name.
        scoped: The objects of `keras.saving.custom_object_scope`.
    """

    by_name: dict[str, Any]
    names: tuple[tuple[Any, str], ...]
    scoped: dict[str, Any]

    @classmethod
    def now(cls) -> "CustomObjects":
        """Copies those of this process."""
        return cls(
            dict(object_registration.GLOBAL_CUSTOM_OBJECTS),
            tuple(object_registration.GLOBAL_CUSTOM_NAMES.items()),
            dict(global_state.get_global_attribute(_SCOPE) or {}),
        )

    def restore(self) -> None:
        """Registers them in this process."""
        object_registration.GLOBAL_CUSTOM_OBJECTS.update(self.by_name)
        object_registration.GLOBAL_CUSTOM_NAMES.update(self.names)
        if self.scoped:
            global_state.set_global_attribute(_SCOPE, dict(self.scoped))


def why_not_sent(value: object) -> str:
    """Names the part of Keras with weights that `value` is; empty if it is none.

    Its tensors belong to this process.
    """
    kinds: tuple[tuple[type, str], ...] = (
        (keras.Model, "a Keras model"),
        (keras.Layer, "a layer"),
        (keras.optimizers.Optimizer, "an optimizer"),
        (keras.Metric, "a metric"),
        (keras.Variable, "a variable of Keras"),
        (keras.KerasTensor, "a symbolic tensor of Keras"),
    )
    kind = next((words for kind, words in kinds if isinstance(value, kind)), "")
    name = getattr(value, "name", None)
    return f"{kind} ({name!r})" if kind and name else kind
