"""The state of Keras that a rank takes over from the process which starts it."""

from typing import Any

import attrs
import keras
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.saving import object_registration

# What `keras.config` has a name and a `set_` for; Keras before 3.14 lacks some.
_SETTINGS = ("floatx", "epsilon", "image_data_format", "max_epochs", "max_steps_per_epoch")
# What a session of Keras notes, besides its policy, its distribution and its generator.
_NOTED = (
    *("global_random_seed", "flash_attention", "interactive_logging", "traceback_filtering"),
    "safe_mode_saving",
)
_NAMES, _POLICY, _SCOPE = "object_name_uids", "dtype_policy", "custom_objects_scope_dict"


@attrs.frozen(eq=False)
class KerasState:
    """Settings, the dtype policy and the seeds of Keras.

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
        """Returns the state of this process; `names`: with the counts of names of layers."""
        names_noted = (*_NOTED, _NAMES) if names else _NOTED
        noted = {name: global_state.get_global_attribute(name) for name in names_noted}
        policy = global_state.get_global_attribute(_POLICY)
        generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
        return cls(
            {name: getattr(keras.config, name)() for name in filter(_is_setting, _SETTINGS)},
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
        """Returns those of this process."""
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
    """Returns what `value` is, if it is a part of Keras with weights; else nothing.

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


def _is_setting(name: str) -> bool:
    return hasattr(keras.config, f"set_{name}")
