"""Patch: `ops.while_loop` outside training, as in `generate()`: captured iterations (ADR 32)."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.closures import Closures
from shardcore.binding.capture.local_tensors import (
    Form,
    from_local,
    local_tensors,
    reduce_partial,
    to_full,
    to_local,
)
from shardcore.binding.capture.prompts import capture_prompts, may_capture
from shardcore.binding.capture.slices import TensorIndices
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
        is_wanted = may_capture(session, self.sessions, self.capture)
        closures = Closures.of(cond, body) if is_wanted else None
        if closures is None or closures.model is None:
            return original(cond, body, loop_vars, maximum_iterations)
        capture_prompts(closures.model, self.sessions, self.capture)
        is_nest = isinstance(loop_vars, tuple | list)
        step = _captured_step(closures.model, closures, self.capture)
        loop = _Loop(cond, body, closures.tensors, step, session)
        with self.sessions.working(closures.model):
            final = loop.run(tuple(loop_vars) if is_nest else (loop_vars,), maximum_iterations)
        return final if is_nest else final[0]


def _captured_step(
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

    def run(self, variables: Variables, maximum_iterations: object) -> Variables:
        """Returns the variables at the end of the loop."""
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
            with TensorIndices():
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
        """Returns the variables that were made, in the nesting of `variables`; these if none."""
        if iteration is None:
            return variables
        shards, forms, _ = iteration
        # Below autograd until here: outside they may need gradients.
        shards = [shard.clone() if shard.is_inference() else shard for shard in shards]
        tensors = from_local(shards, forms, self.session)
        return cast("Variables", keras_private.pack_leaves(variables, tensors))


# The local shards of the variables after an iteration, their forms, and whether to go on.
_Iteration = tuple[list[Any], list[Form], Any]
