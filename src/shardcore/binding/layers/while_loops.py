"""Patch: `ops.while_loop` outside training, as in `generate()`: iterations are captured steps."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.captured.closures import Closures
from shardcore.binding.captured.step import CapturedStep
from shardcore.binding.context.session import Session, Sessions
from shardcore.binding.layers.slices import TensorIndices
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
        closures = Closures.of(cond, body) if self._may_capture(session) else None
        if closures is None or closures.model is None:
            return original(cond, body, loop_vars, maximum_iterations)
        is_nest = isinstance(loop_vars, tuple | list)
        step = _captured(closures.model, closures, self.capture)
        loop = _Loop(cond, body, closures.tensors, step, session)
        with self.sessions.working(closures.model):
            made = loop.run(tuple(loop_vars) if is_nest else (loop_vars,), maximum_iterations)
        return made if is_nest else made[0]

    def _may_capture(self, session: Session | None) -> bool:
        return (
            (session is not None or self.sessions.entry.serves_one_device)
            and self.sessions.run() is None  # else it is a part of another step
            and not (
                torch.is_grad_enabled()
                or self.capture.is_recording()
                or keras_private.is_symbolic()
            )
            and threading.current_thread() is threading.main_thread()
        )


def _captured(
    model: keras.Model, closures: Closures, capture: StepCapture[torch.Tensor]
) -> CapturedStep:
    """Returns the step of the loops of `model` with such closures."""
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

    def run(self, variables: Variables, maximum_iterations: Any) -> Variables:
        """Returns the variables at the end of the loop."""
        most = None if maximum_iterations is None else int(self._full(maximum_iterations))
        variables = keras_private.map_leaves(self._reduced, variables)
        goes_on, count = self._full(self.cond(*variables)), 0
        while goes_on and (most is None or count < most):
            variables, goes_on = self._next(variables, follows=count > 0)
            count += 1
        return variables

    def _next(self, variables: Variables, *, follows: bool) -> tuple[Variables, Any]:
        """Returns the next variables, and whether to go on; it `follows` another iteration."""

        def step() -> Any:
            with TensorIndices():
                made = self.body(*variables)
                made = made if isinstance(made, tuple | list) else (made,)
                tensors = [self._reduced(each) for each in keras_private.leaves(made)]
                goes_on = self._full(self.cond(*keras_private.packed(variables, tensors)))
            return [self._local(each) for each in tensors], list(map(self._form, tensors)), goes_on

        with nullcontext() if self.session is None else self.session.strategy.scope():
            data = (variables, self.tensors)
            parts, forms, goes_on = self.captured(step, data, self.session, follows=follows)
        made = [self._joined(*each) for each in zip(parts, forms, strict=True)]
        return keras_private.packed(variables, made), goes_on

    def _full(self, value: Any) -> Any:
        """Returns the full value of a tensor; what is no tensor as it is."""
        if self.session is None or not isinstance(value, torch.Tensor):
            return value
        return self.session.strategy.full_tensor(value)

    def _reduced(self, value: Any) -> torch.Tensor:
        """Returns a value as a tensor that is no partial sum."""
        tensor: torch.Tensor = keras.ops.convert_to_tensor(value)
        if self.session is None or not self.session.strategy.owns(tensor):
            return tensor
        return self.session.strategy.activation(tensor, None)

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.session is None else self.session.strategy.local(tensor)

    def _form(self, tensor: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
        """Returns the layout of a tensor, None of a plain one, and its global shape."""
        layout = None if self.session is None else self.session.strategy.layout(tensor)
        return layout, tuple(tensor.shape)

    def _joined(self, part: torch.Tensor, form: tuple[Any, tuple[int, ...]]) -> torch.Tensor:
        layout, shape = form
        if layout is None or self.session is None:
            return part
        return self.session.join(part, layout, shape)
