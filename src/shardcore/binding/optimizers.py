"""Seams: optimizers. Adam's update is one operator; Nadam reads no number while recorded."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from keras import ops
from torch.optim.adam import adam

from shardcore.binding import seams
from shardcore.binding.session import Sessions
from shardcore.ports.capture import StepCapture


def fused_update(
    sessions: Sessions,
    original: Callable[..., None],
    optimizer: Any,
    grads: list[Any],
    variables: list[Any],
    learning_rate: Any,
) -> None:
    """`Adam._parallel_update_step`: torch's fused update, which goes once over all tensors.

    It looks at no strides, so all must be contiguous, and the moments of a variable must have its
    layout: a strategy may shard them further. Inductor gets Keras' own operators, which it
    fuses: it does not know this one.
    """
    values = [each.value for each in variables]
    moments = seams.moments_of(optimizer, variables)
    fits = _lie_alike(sessions, values, moments)
    if not sessions.are_served() or _is_compiled(sessions) or not fits:
        original(optimizer, grads, variables, learning_rate)
        return
    # After endless steps torch corrects nothing: Keras has that in the learning rate.
    endless = torch.full((), torch.inf, device=values[0].device)
    first, second, largest = moments
    adam(
        values,
        [each if each.is_contiguous() else each.contiguous() for each in grads],
        first,
        second,
        largest,
        [endless] * len(values),
        fused=True,
        amsgrad=optimizer.amsgrad,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        lr=_corrected_rate(optimizer, learning_rate, values[0].dtype),
        weight_decay=0.0,
        eps=optimizer.epsilon,
        maximize=False,
    )


def _lie_alike(sessions: Sessions, values: list[Any], moments: tuple[list[Any], ...]) -> bool:
    """Whether all are contiguous, and the moments of each variable have its layout."""
    if not all(each.is_contiguous() for kept in (values, *moments) for each in kept):
        return False
    session = sessions.current()
    if session is None:
        return True
    layouts = [list(map(session.strategy.layout, each)) for each in (values, *moments) if each]
    return all(each == layouts[0] for each in layouts)


def _is_compiled(sessions: Sessions) -> bool:
    run = sessions.run()
    return run is not None and run.trainer.jit_compile is True


def _corrected_rate(optimizer: Any, learning_rate: Any, dtype: torch.dtype) -> Any:
    """The learning rate, with what both moments lack in the first steps, as Keras works it out."""
    step = ops.cast(optimizer.iterations + 1, dtype)
    first, second = (
        1 - ops.power(ops.cast(each, dtype), step) for each in (optimizer.beta_1, optimizer.beta_2)
    )
    return ops.cast(learning_rate, dtype) * ops.sqrt(second) / first


@attrs.frozen
class NumbersOfNadam:
    """Stands in for Keras' module `core`: in a recording a number stays in its tensor."""

    core: Any
    capture: StepCapture

    def convert_to_numpy(self, number: Any) -> Any:
        """`number`, to be divided by: as a tensor it gives the same to the last bit."""
        return number if self.capture.is_recording() else self.core.convert_to_numpy(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)
