"""The attributes that a step may look up: of layers, the optimizer, metrics and losses."""

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import attrs
import torch

from shardcore.binding import seams
from shardcore.binding.agreement import variables_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, dict, set)
# How far from a layer, an optimizer, a metric or a loss an attribute is still guarded.
_DEPTH = 4
_NOT_ENTERED = (type, ModuleType, FunctionType, MethodType, torch.Tensor)
# Whose classes do not change from one step to the next.
_LIBRARIES = sys.stdlib_module_names | {"attr", "keras", "shardcore", "torch"}


class Holder(Protocol):
    """A dict, or what is asked like one."""

    def get(self, key: Any, /) -> Any:
        """What is held under `key` now, None if nothing is."""
        ...


@attrs.frozen
class GuardedAttribute:
    """An attribute of an object, or an entry of a dict, that the next step looks up again.

    Args:
        holder: The dict, or what is asked like one.
        key: The key in it.
        name: Whose it is, for people: "attribute 'rate' of Dropout 'dropout_1'".
    """

    holder: Holder
    key: Any
    name: str

    @property
    def value(self) -> Any:
        """The value that is held there now; None if there is none."""
        return self.holder.get(self.key)


@attrs.frozen
class _Slots:
    """The attributes of an object that keeps them in slots."""

    owner: Any

    def get(self, key: str, /) -> Any:
        return getattr(self.owner, key, None)


def guarded_attributes(trainer: Any) -> Iterator[GuardedAttribute]:
    """Yields all attributes that the steps of `trainer` may look up."""
    visited: set[int] = set()
    for variable in _variables(trainer):
        visited.add(id(variable))
        yield from _of_variable(variable)
    for name, module in seams.modules_of(trainer):
        for holder in _tensor_dicts(module):
            for key in holder:
                yield GuardedAttribute(holder, key, f"{key!r} of torch module {name!r}")
    torch_modules = [each for _, each in seams.modules_of(trainer) if not seams.is_layer(each)]
    roots = [*seams.parts_of(trainer), *torch_modules]
    for root in roots:  # each by itself, however deep the others hold it
        visited |= {id(each) for each in roots}
        visited.discard(id(root))
        yield from _attributes(root, visited, 0)


def members(container: Any) -> Any:
    """Returns a view of the members of a list, set or tuple, and of the values of a dict."""
    return container.values() if isinstance(container, dict) else container


def _tensor_dicts(module: Any) -> Iterator[dict[Any, Any]]:
    """The dicts in which a torch module keeps its own parameters and buffers."""
    own: dict[str, Any] = dict(module.named_parameters(recurse=False))
    own.update(module.named_buffers(recurse=False))
    for value in vars(module).values():
        if isinstance(value, dict) and any(value.get(key) is own[key] for key in own):
            yield value


def _variables(trainer: Any) -> Iterable[Any]:
    seed = seams.global_seed()
    return [*variables_of(trainer), *([] if seed is None else [seed])]


def _of_variable(variable: Any) -> Iterator[GuardedAttribute]:
    for key in ("_value", "_trainable"):
        yield GuardedAttribute(vars(variable), key, f"variable {variable.path!r}")


def _attributes(owner: Any, visited: set[int], depth: int) -> Iterator[GuardedAttribute]:
    """The attributes of `owner`, and of what it holds."""
    if id(owner) in visited or depth > _DEPTH:
        return
    visited.add(id(owner))
    told = f"{type(owner).__name__} {getattr(owner, 'name', '')!r}"
    for holder, key, value in _entries(owner):
        name = f"attribute {key!r} of {told}"
        yield GuardedAttribute(holder, key, name)
        is_nested = _is_users(type(owner)) or isinstance(owner, torch.optim.Optimizer)
        yield from _within(value, name, key, is_nested, visited, depth + 1)
    for kind in type(owner).__mro__:
        if id(kind) not in visited and _is_users(kind):
            visited.add(id(kind))
            names = (key for key in vars(kind) if not key.startswith("__"))
            yield from (GuardedAttribute(vars(kind), key, f"{key!r} of {kind}") for key in names)


def _entries(owner: Any) -> Iterator[tuple[Holder, str, Any]]:
    """What an object holds, with the names."""
    for key, value in list(getattr(owner, "__dict__", {}).items()):
        if key not in seams.RUNS_NOTED:
            yield vars(owner), key, value
    for kind in type(owner).__mro__:
        for key in vars(kind).get("__slots__", ()) if _is_users(kind) else ():
            if key not in ("__dict__", "__weakref__"):
                yield _Slots(owner), key, getattr(owner, key, None)


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _within(
    value: Any, name: str, key: str, is_nested: bool, visited: set[int], depth: int
) -> Iterator[GuardedAttribute]:
    """What is held within the attribute `key`: by an object, or by the members of a container.

    A container in a container is guarded by itself where it is `is_nested`: Keras' own are left
    out. A variable that is not the model's is that of an optimizer of the user's own.
    """
    if seams.is_variable(value):
        if id(value) not in visited:
            visited.add(id(value))
            yield from _of_variable(value)
        return
    if not isinstance(value, (*CONTAINERS, tuple)):
        if _is_entered(value):
            yield from _attributes(value, visited, depth)
        return
    if id(value) in visited or depth > _DEPTH:
        return
    visited.add(id(value))
    for member in list(members(value)):
        if isinstance(member, CONTAINERS) and is_nested:
            yield GuardedAttribute({key: member}, key, name)
        yield from _within(member, name, key, is_nested, visited, depth + 1)


def _is_entered(value: Any) -> bool:
    """Whether what `value` holds is looked at too."""
    return (
        (hasattr(value, "__dict__") or hasattr(value, "__slots__"))
        and not isinstance(value, (*PLAIN, *_NOT_ENTERED))
        and not seams.is_bookkeeping(value)
    )
