"""Attributes of Keras variables and layout maps: the tensor, the shape, how it is stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from keras import Variable
from keras.distribution import LayoutMap, ModelParallel
from keras.src.backend.common.variables import Variable as VariableOfAnyBackend

from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.path_rules import Match
from shardcore.domain.layouts.spec import DimSpec

# Attributes that Keras does not change after a variable is made.
_FIXED = {
    *("_path", "_shape", "_dtype", "_initializer", "_ndim", "_layout"),
    *("_aggregation", "_synchronization"),
}
# Those that it reads of a weight in training only.
_OF_WEIGHTS = {"_regularizer", "_constraint", "_overwrite_with_gradient", "_autocast"}


@attrs.frozen(eq=False)
class Storage:
    """The storage of a Keras variable; all is None for one that was never laid out."""

    session: Any = None  # the `Session` whose strategy stores it
    layout: Layout | None = None  # the storage layout
    is_ruled: bool = False  # whether the distribution decided the layout, and not the caller
    rule: Match[Any] | None = None  # the rule of the layout map that decided

    @property
    def rule_key(self) -> str | None:
        """The key of the rule, None without one."""
        return None if self.rule is None else self.rule.key


def storage_of(variable: Variable) -> Storage:
    """Looks up how `variable` is stored."""
    storage: Storage = getattr(variable, "_shardcore_storage", Storage())
    return storage


def set_storage(variable: Variable, storage: Storage) -> None:
    """Notes how `variable` is stored."""
    variable._shardcore_storage = storage


def state_of(variable: Variable) -> tuple[str, ...]:
    """Lists the attributes of a variable that may change between steps and count in one."""
    unread = _FIXED if variable._trainable else _FIXED | _OF_WEIGHTS
    return tuple(key for key in vars(variable) if key not in unread)


def tensor_of(variable: Variable) -> Any:
    """The tensor that a variable stores, without the casts of `variable.value`."""
    return variable._value


def set_tensor(variable: Variable, tensor: torch.Tensor) -> None:
    """Replaces the tensor of a variable; an assignment would copy into it."""
    variable._value = tensor


def initial_value(variable: Variable, initializer: Any, shape: Sequence[int]) -> Any:
    """Calls `initializer` for a part of a new variable, in the variable's dtype."""
    return initializer(shape, dtype=variable._dtype)


def initialize(variable: Variable, tensor: torch.Tensor) -> None:
    """Stores the first tensor of a variable, as Keras does with the result of an initializer."""
    variable._initialize(tensor)


def update_shape(variable: Variable) -> None:
    """Sets the shape of a variable by its tensor."""
    variable._shape = variable._validate_shape(variable._value.shape)


def layout_of(variable: Variable) -> Any:
    """Keras' `TensorLayout` of a variable, None without one."""
    return getattr(variable, "_layout", None)


def set_layout(variable: Variable, layout: object) -> None:
    """Sets the `TensorLayout`, which Keras reads only when it creates variables like this one."""
    variable._layout = layout


def layout_map_of(distribution: object) -> LayoutMap | None:
    """The layout map of a distribution, None without one."""
    return getattr(distribution, "_layout_map", None)


def entries_of(layout_map: LayoutMap) -> Mapping[str, Any]:
    """The layouts in a map by their keys, as they were given."""
    entries: Mapping[str, Any] = layout_map._layout_map
    return entries


def set_batch_axes(distribution: ModelParallel, axes: DimSpec) -> None:
    """Sets `batch_dim_name` of a distribution."""
    distribution._batch_dim_name = axes


def is_seed(variable: Variable) -> bool:
    """Recognizes the state of a `keras.random.SeedGenerator` by its name."""
    return bool(variable.name == "seed_generator_state")


def repr_with_value(variable: Variable) -> str:
    """Formats a variable as Keras does; Keras 3.16 leaves out the value of a DTensor."""
    return str(VariableOfAnyBackend.__repr__(variable))
