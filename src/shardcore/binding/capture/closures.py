"""The closures of functions that each call makes, such as the body of a loop (ADR 32)."""

from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import attrs
import keras
import numpy as np
import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@attrs.frozen
class Closures:
    """The values in the closures of functions, nested functions included.

    Args:
        codes: The code of the functions.
        tensors: The tensors, each once.
        objects: Layers, samplers and whatever else is no number, name, array or container.
        key: Equal for functions that differ in the values of their tensors only.
    """

    codes: frozenset[CodeType]
    tensors: tuple[torch.Tensor, ...]
    objects: tuple[Any, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, *functions: Any) -> "Closures":
        """Returns the values in the closures of `functions`.

        Example:
            >>> def linear(scale, shift):
            ...     return lambda x: x * scale + shift
            >>> found = Closures.of(linear(torch.tensor(2.0), shift=3))
            >>> found.tensors, found.objects, (int, 3) in found.key
            ((tensor(2.),), (), True)
        """
        walk = _ClosureWalk()
        key = tuple(walk.key(functions))
        return cls(frozenset(walk.codes), tuple(walk.tensors), tuple(walk.objects), key)

    @property
    def model(self) -> keras.Model | None:
        """The first model among the objects; None without one."""
        return next((model for model in self.objects if isinstance(model, keras.Model)), None)


@attrs.define(eq=False)
class _ClosureWalk:
    codes: set[CodeType] = attrs.field(factory=set, init=False)
    tensors: list[torch.Tensor] = attrs.field(factory=list, init=False)
    objects: list[Any] = attrs.field(factory=list, init=False)
    # By identity, and kept: no other object gets that identity.
    visited: dict[int, Any] = attrs.field(factory=dict, init=False)

    def key(self, value: Any) -> Iterator[Any]:
        """Yields the parts of the key of a value, and notes its contents."""
        if isinstance(value, PLAIN):
            yield type(value), value
        elif id(value) in self.visited:
            yield list(self.visited).index(id(value))
        else:
            self.visited[id(value)] = value
            yield from self._parts(value)

    def _parts(self, value: object) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, np.ndarray):
            yield value.shape, value.dtype, value.tobytes()
        elif isinstance(value, FunctionType):
            self.codes.add(value.__code__)
            yield value.__code__
            yield from self.key(list(map(_content, value.__closure__ or ())))
            yield from self.key((value.__defaults__, value.__kwdefaults__))
        elif isinstance(value, MethodType):
            yield from self.key((value.__func__, value.__self__))
        elif isinstance(value, dict):
            yield from self.key([inner for pair in value.items() for inner in pair])
        elif isinstance(value, list | tuple):
            yield type(value), len(value)
            for inner in value:
                yield from self.key(inner)
        else:
            self.objects.append(value)
            yield id(value)


def _content(cell: Any) -> Any:
    """Returns what a cell holds; None if nothing is assigned to its name yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
