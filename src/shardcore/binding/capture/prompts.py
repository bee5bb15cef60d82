"""The prompt of `generate()`: the method of a model that fills the cache is a captured step.

keras-hub's models call it before the loop of tokens, all by one name.
"""

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import keras
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.closures import PLAIN
from shardcore.binding.capture.local_tensors import from_local, reduce_partial, to_local
from shardcore.binding.capture.step import CapturedStep
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.ports.capture import StepCapture


def capture_prompts(
    model: keras.Model, sessions: Sessions, capture: StepCapture[torch.Tensor]
) -> None:
    """Captures the prompts of a `model` from its next one on, if it fills a cache by a method."""
    name = keras_private.FILLS_CACHE
    attribute = vars(model).get(name)
    is_ours = isinstance(attribute, _Prompt)
    if (is_ours and attribute.sessions is sessions) or (attribute is not None and not is_ours):
        return
    if callable(getattr(type(model), name, None)):
        step = CapturedStep(model, name, capture)
        vars(model)[name] = _Prompt(model, sessions, capture, step)


@attrs.frozen(eq=False)
class _Prompt:
    """The method of one model that fills the cache, as an attribute that shadows it.

    Args:
        model: The model.
        sessions: The sessions of the installation.
        capture: Records, and makes programs.
        captured: Runs the method.
    """

    model: keras.Model
    sessions: Sessions
    capture: StepCapture[torch.Tensor]
    captured: CapturedStep

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Returns what the method returns."""
        method = partial(getattr(type(self.model), keras_private.FILLS_CACHE), self.model)
        arguments = keras_private.map_leaves(_as_tensor, (args, kwargs))
        session = self.sessions.current()
        if not (
            may_capture(session, self.sessions, self.capture)
            and _need_no_exchange(arguments, session)
        ):
            return method(*args, **kwargs)

        def step() -> Any:
            cache = method(*arguments[0], **arguments[1])
            leaves = [_reduce_leaf(leaf, session) for leaf in keras_private.leaves(cache)]
            return *to_local(leaves, session), keras_private.map_leaves(lambda _: 0, cache)

        scope = nullcontext() if session is None else session.strategy.implicit_replication()
        with scope, self.sessions.working(self.model):
            shards, forms, nest = self.captured(step, arguments, session)
        return keras_private.pack_leaves(nest, from_local(shards, forms, session))


def may_capture(
    session: Session | None, sessions: Sessions, capture: StepCapture[torch.Tensor]
) -> bool:
    """Returns whether a part of `generate()` may be a captured step here."""
    return (
        (session is not None or sessions.entry.serves_one_device)
        and not sessions.is_closed
        and sessions.run() is None  # else it is a part of another step
        and not (torch.is_grad_enabled() or capture.is_recording() or keras_private.is_symbolic())
        and threading.current_thread() is threading.main_thread()
    )


def _need_no_exchange(arguments: object, session: Session | None) -> bool:
    """Returns whether arguments are tensors and numbers whose rows need no exchange of counts."""
    leaves = keras_private.leaves(arguments)
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return False
    if session is None or session.distribution.auto_shard_dataset:
        return True
    # Of plain rows a layer would ask the other ranks how many they have, which is not recorded.
    return all(session.strategy.owns(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _as_tensor(leaf: object) -> Any:
    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _reduce_leaf(leaf: object, session: Session | None) -> Any:
    return reduce_partial(leaf, session) if isinstance(leaf, torch.Tensor) else leaf
