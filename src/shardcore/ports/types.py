"""Types of what crosses a port or the public API, and the check of the entries of plug-ins.

They name no class of torch or Keras.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeVar

import attrs

from shardcore.domain.errors import PluginError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.spec import DimSpec


class Array(Protocol):
    """A tensor or an array: of torch, NumPy or JAX."""

    @property
    def shape(self) -> Sequence[int]:
        """The shape; of a sharded tensor the global one."""


class Tensor(Array, Protocol):
    """A `torch.Tensor`, plain or sharded."""

    def detach(self) -> Self:
        """The same values without their autograd graph."""

    def copy_(self, value: Self, /) -> Self:
        """Overwrites the values in place."""


# The tensor class of one strategy: `torch.Tensor`, or a subclass of it.
TensorT = TypeVar("TensorT", bound=Tensor)
TensorT_contra = TypeVar("TensorT_contra", bound=Tensor, contravariant=True)


class KerasVariable(Protocol):
    """A `keras.Variable`."""

    @property
    def path(self) -> str:
        """The path, such as "decoder/dense/kernel"."""

    @property
    def shape(self) -> Sequence[int | None]:
        """The global shape."""


KerasVariableT = TypeVar("KerasVariableT", bound=KerasVariable)


class KerasLayer(Protocol):
    """A `keras.Layer`."""

    @property
    def built(self) -> bool:
        """Whether it has its variables."""


class KerasModel(Protocol):
    """A `keras.Model`."""

    @property
    def variables(self) -> Sequence[KerasVariable]:
        """All variables, those that are not trained included."""


KerasModelT = TypeVar("KerasModelT", bound=KerasModel)


class DeviceMesh(Protocol):
    """The `DeviceMesh` of Keras or of torch."""

    @property
    def shape(self) -> Sequence[int]:
        """The number of ranks along each axis."""


# A mesh as users give one.
MeshLike = DeviceMesh | Mesh


class TensorLayout(Protocol):
    """A `keras.distribution.TensorLayout`."""

    @property
    def axes(self) -> Sequence[str | None]:
        """Per tensor dim the mesh axis that shards it."""


# A layout as users write one: a Keras layout, or one mesh axis, or None, per tensor dim.
LayoutLike = TensorLayout | Sequence[DimSpec]

# The rules of a layout map as users write them.
RulesLike = Mapping[str, LayoutLike] | Iterable[tuple[str, LayoutLike]]


class TorchModule(Protocol):
    """A `torch.nn.Module`."""

    def named_parameters(self) -> Iterable[tuple[str, object]]:
        """The parameters by name, such as "encoder.0.weight"."""


TorchModuleT = TypeVar("TorchModuleT", bound=TorchModule)


PredicateT_contra = TypeVar("PredicateT_contra", contravariant=True)


class UpdateOnDevice(Protocol[PredicateT_contra]):
    """An update that this thread runs, with branches of which some are not taken."""

    def where(self, predicate: PredicateT_contra) -> AbstractContextManager[None]:
        """Opens a branch: what it writes into tensors stays only if `predicate` is true.

        A branch within another one is taken if the predicates of both are true.

        Args:
            predicate: A plain tensor with one bool, on the device of what is written.
        """


class OpenUpdateOnDevice(Protocol[PredicateT_contra]):
    """Opens an `UpdateOnDevice`."""

    def __call__(self) -> AbstractContextManager[UpdateOnDevice[PredicateT_contra]]:
        """Opens an update, in which torch takes no factor from a tensor as a number either."""


@attrs.frozen
class Kind:
    """The values that a field may have.

    Args:
        expected: They in words, for the error.
        holds: Returns whether a value is one of them.
    """

    expected: str
    holds: Callable[[object], bool]


TEXT = Kind("str", lambda value: isinstance(value, str))
BOOL = Kind("bool", lambda value: isinstance(value, bool))
INT = Kind("int", lambda value: type(value) is int)
COUNT = Kind("an int of 1 or more", lambda value: type(value) is int and value >= 1)
INT_OR_NONE = Kind("int or None", lambda value: value is None or type(value) is int)
FUNCTION = Kind("a function", callable)
NAME = Kind(
    "small letters, digits, - and _, a letter first",
    lambda value: isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_-]*", value) is not None,
)


def check(entry: object, **kinds: Kind) -> None:
    """Raises a PluginError for the first field of `entry` that is of another kind."""
    for field, kind in kinds.items():
        value = getattr(entry, field)
        if not kind.holds(value):
            raise PluginError(
                f"{type(entry).__name__}({field}=...): expected {kind.expected}, got {value!r}",
                got=repr(value),
            )
