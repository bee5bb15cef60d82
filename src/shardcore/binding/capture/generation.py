"""`generate()`: the prompt, and each iteration of the loop of tokens, are captured steps (ADR 32).

`ops.while_loop` is patched. A prompt is the method by which keras-hub's models fill their cache
before the loop, all by one name.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import attrs
import keras
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.local_tensors import (
    Form,
    from_local,
    local_tensors,
    reduce_partial,
    to_full,
    to_local,
)
from shardcore.binding.capture.signatures import PLAIN, Closures
from shardcore.binding.capture.slices import tensor_indices
from shardcore.binding.capture.step import CapturedStep
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.ports.capture import StepCapture

# The loops of one model, by their closures, whose programs are kept.
_MOST_LOOPS = 32

Variables = tuple[Any, ...]


@attrs.frozen
class WhileLoops:
    """Captures loops whose functions hold a model, and which need no gradient."""

    sessions: Sessions
    capture: StepCapture[torch.Tensor]

    @replaces(
        "keras.src.backend.torch.core:while_loop",
        reason="Every token of generate() runs eagerly: an iteration is a captured step.",
    )
    def run(
        self,
        original: Original,
        cond: Callable[..., Any],
        body: Callable[..., Any],
        loop_vars: Any,
        maximum_iterations: Any = None,
    ) -> Any:
        """Replaces `while_loop`: one step computes the next variables, and whether to go on."""
        session = self.sessions.current()
        is_wanted = _may_capture(self.sessions, self.capture)
        closures = Closures.of(cond, body) if is_wanted else None
        if closures is None or closures.model is None:
            return original(cond, body, loop_vars, maximum_iterations)
        _capture_prompts(closures.model, self.sessions, self.capture)
        is_nest = isinstance(loop_vars, tuple | list)
        step = _captured_step(closures.model, closures, self.capture)
        loop = _Loop(cond, body, closures.tensors, step, session)
        with self.sessions.working(closures.model):
            final = loop.run(tuple(loop_vars) if is_nest else (loop_vars,), maximum_iterations)
        return final if is_nest else final[0]


def _captured_step(
    model: keras.Model, closures: Closures, capture: StepCapture[torch.Tensor]
) -> CapturedStep:
    steps: dict[Any, CapturedStep] = vars(model).setdefault(keras_private.LOOP_STEPS, {})
    if closures.key not in steps:
        if len(steps) == _MOST_LOOPS:
            del steps[next(iter(steps))]
        steps[closures.key] = CapturedStep(model, "while_loop", capture, closures)
    return steps[closures.key]


@attrs.frozen
class _Loop:
    """One run of a loop.

    Args:
        cond: Returns whether to go on with these variables.
        body: Returns the next variables.
        tensors: The tensors in the closures of both.
        captured: Runs an iteration.
        session: The session of the loop; None on one device.
    """

    cond: Callable[..., Any]
    body: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    captured: CapturedStep
    session: Session | None

    def run(self, variables: Variables, maximum_iterations: object) -> Variables:
        most = (
            None if maximum_iterations is None else int(to_full(maximum_iterations, self.session))
        )
        variables = keras_private.map_leaves(
            partial(reduce_partial, session=self.session), variables
        )
        goes_on, count = to_full(self.cond(*variables), self.session), 0
        closure_shards = local_tensors(self.tensors, self.session)
        last: _Iteration | None = None
        while goes_on and (most is None or count < most):
            # As long as one program computes them, variables stay local shards: no code reads them.
            again = last and self.captured.run_again([*last[0], *closure_shards])
            last = again or self._next(self._from_shards(last, variables), follows=count > 0)
            goes_on, count = last[2], count + 1
        return self._from_shards(last, variables)

    def _next(self, variables: Variables, *, follows: bool) -> "_Iteration":
        """Makes the next variables; it `follows` another iteration."""

        def step() -> Any:
            with tensor_indices():
                outputs = self.body(*variables)
                outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
                tensors = [
                    reduce_partial(leaf, self.session) for leaf in keras_private.leaves(outputs)
                ]
                goes_on = self.cond(*keras_private.pack_leaves(variables, tensors))
                return *to_local(tensors, self.session), to_full(goes_on, self.session)

        with (
            nullcontext() if self.session is None else self.session.strategy.implicit_replication()
        ):
            data = (variables, self.tensors)
            iteration: _Iteration = self.captured(step, data, self.session, follows=follows)
            return iteration

    def _from_shards(self, iteration: "_Iteration | None", variables: Variables) -> Variables:
        if iteration is None:
            return variables
        shards, forms, _ = iteration
        # Below autograd until here: outside they may need gradients.
        shards = [shard.clone() if shard.is_inference() else shard for shard in shards]
        tensors = from_local(shards, forms, self.session)
        return cast("Variables", keras_private.pack_leaves(variables, tensors))


# The local shards of the variables after an iteration, their forms, and whether to go on.
_Iteration = tuple[list[Any], list[Form], Any]


def _capture_prompts(
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
        method = partial(getattr(type(self.model), keras_private.FILLS_CACHE), self.model)
        arguments = keras_private.map_leaves(_as_tensor, (args, kwargs))
        session = self.sessions.current()
        if not (
            _may_capture(self.sessions, self.capture) and _need_no_exchange(arguments, session)
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


def _may_capture(sessions: Sessions, capture: StepCapture[torch.Tensor]) -> bool:
    return (
        sessions.are_served()
        and not sessions.is_closed
        and sessions.run() is None  # else it is a part of another step
        and not (torch.is_grad_enabled() or capture.is_recording() or keras_private.is_symbolic())
        and threading.current_thread() is threading.main_thread()
    )


def _need_no_exchange(arguments: object, session: Session | None) -> bool:
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
