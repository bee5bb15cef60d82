"""Local shards of tensors, which a captured step takes and returns, and tensors made of them."""

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state.objects import attributes_of
from shardcore.binding.ranks.session import Session

# The layout of a tensor, None of a plain one, and its global shape; None of what is no tensor.
Form = tuple[Any, tuple[int, ...]] | None


def to_full(value: object, session: Session | None) -> Any:
    """All-gathers a distributed tensor; other values stay."""
    if session is None or not isinstance(value, torch.Tensor):
        return value
    return session.strategy.full_tensor(value)


def reduce_partial(value: object, session: Session | None) -> torch.Tensor:
    """Converts a value to a tensor, and all-reduces it if it is a partial sum."""
    tensor: torch.Tensor = keras.ops.convert_to_tensor(value)
    if session is None or not session.strategy.owns(tensor):
        return tensor
    return session.strategy.redistribute(tensor, None)


def to_local(values: Sequence[Any], session: Session | None) -> tuple[list[Any], list[Form]]:
    """Splits each tensor into its local shard and its form; other values have no form."""
    forms = [_form(value, session) for value in values]
    if session is None:
        return list(values), forms
    local = session.strategy.to_local
    return [
        value if form is None else local(value) for value, form in zip(values, forms, strict=True)
    ], forms


def from_local(
    shards: Sequence[object], forms: Sequence[Form], session: Session | None
) -> list[Any]:
    """Joins local shards to the values that `to_local` split, by their forms."""
    return [_from_local(shard, form, session) for shard, form in zip(shards, forms, strict=True)]


def local_tensors(data: object, session: Session | None) -> list[Any]:
    """Lists the local shards of the tensors of a batch, below autograd."""
    tensors = [leaf for leaf in keras_private.leaves(data) if isinstance(leaf, torch.Tensor)]
    if session is None:
        return tensors
    with torch.no_grad():
        return [session.strategy.to_local(tensor) for tensor in tensors]


def why_not_seen(data: object) -> str:
    """Says what of a batch no signature has: attributes, gradients, classes; empty for nothing.

    Code may read an attribute that a user, or Keras for a mask, has set on a tensor. A step on
    another thread may run beside one of the main thread.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        return f"it runs on thread {thread.name!r}, and steps are captured on the main one alone"
    try:
        leaves = keras_private.leaves(data)
    except TypeError:  # Keras sorts the keys of dicts
        return "its batch has a dict whose keys have no order: use texts"
    reasons = (_why_leaf(leaf) for leaf in leaves)
    return next(filter(None, chain(reasons, map(_why_container, _containers(data)))), "")


def _why_leaf(leaf: Any) -> str:
    kind: Any = type(leaf)
    if not isinstance(leaf, torch.Tensor):
        if not attributes_of(leaf):
            return ""
        return f"its batch holds an object of class {kind.__qualname__}: give tensors and numbers"
    if leaf.requires_grad:
        return "a tensor of its batch requires a gradient: detach it"
    if leaf.layout is not torch.strided:
        return "a tensor of its batch is sparse: convert it by to_dense()"
    if kind.__module__.startswith(("shardcore.", "torch.distributed.")):
        return ""  # their attributes are ours and torch's
    if kind is not torch.Tensor:
        return f"a tensor of its batch is of class {kind.__qualname__}: give a torch.Tensor"
    if vars(leaf):
        name = next(iter(vars(leaf)))
        return f"a tensor of its batch has an attribute {name!r}: give its value in the batch"
    return "" if leaf.grad is None else "a tensor of its batch has a gradient: detach it"


def _why_container(container: Any) -> str:
    if not attributes_of(container):
        return ""
    name = type(container).__qualname__
    return f"its batch holds a {name} with attributes: give their values in the batch"


def _containers(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list | tuple):
        yield data
        for part in data.values() if isinstance(data, dict) else data:
            yield from _containers(part)


def _form(value: object, session: Session | None) -> Form:
    if not isinstance(value, torch.Tensor):
        return None
    return None if session is None else session.strategy.layout(value), tuple(value.shape)


def _from_local(shard: Any, form: Form, session: Session | None) -> Any:
    if session is None or form is None or form[0] is None:
        return shard
    layout, shape = form
    return session.from_local(shard, layout, shape)
