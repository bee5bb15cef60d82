"""Patches: the update of `Adam`, one call of torch, and a number of `Nadam` that a trace keeps."""

from types import ModuleType
from typing import Any

import attrs
import keras
import torch
from torch.optim.adam import adam

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import Original
from shardcore.ports.capture import StepCapture


@replaces(
    f"{keras_private.ADAM}:Adam._parallel_update_step",
    reason="Runs ten operators over all variables: torch has one.",
)
def fused_update(
    sessions: Sessions,
    original: Original,
    optimizer: keras.optimizers.Adam,
    grads: list[torch.Tensor],
    variables: list[keras.Variable],
    learning_rate: torch.Tensor | float,
) -> None:
    """Replaces `Adam._parallel_update_step` by torch's fused update, one pass over all tensors.

    It ignores strides, so all must be contiguous. The moments of a variable must have its layout; a
    strategy may shard them further. A compiled step keeps the operators of Keras, which Inductor
    fuses; it has no code for the fused update.
    """
    values = [variable.value for variable in variables]
    moments = keras_private.moments_of(optimizer, variables)
    run, fits = sessions.run(), _have_one_layout(sessions, values, moments)
    is_compiled = run is not None and run.trainer.jit_compile is True
    if not sessions.are_served() or is_compiled or not fits:
        original(optimizer, grads, variables, learning_rate)
        return
    # At an infinite step torch applies no bias correction: Keras has it in the learning rate.
    endless = torch.full((), torch.inf, device=values[0].device)
    first, second, largest = moments
    adam(
        values,
        [grad if grad.is_contiguous() else grad.contiguous() for grad in grads],
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


def _have_one_layout(
    sessions: Sessions, values: list[torch.Tensor], moments: tuple[list[torch.Tensor], ...]
) -> bool:
    """Returns whether all are contiguous, and the moments of each variable have its layout."""
    if not all(tensor.is_contiguous() for tensors in (values, *moments) for tensor in tensors):
        return False
    session = sessions.current()
    if session is None:
        return True
    layouts = [
        list(map(session.strategy.layout, tensors)) for tensors in (values, *moments) if tensors
    ]
    return all(kind_layouts == layouts[0] for kind_layouts in layouts)


def _corrected_rate(
    optimizer: keras.optimizers.Adam, learning_rate: torch.Tensor | float, dtype: torch.dtype
) -> Any:
    """Returns the learning rate with the bias correction of both moments, computed as in Keras."""
    step = keras.ops.cast(optimizer.iterations + 1, dtype)
    first, second = (
        1 - keras.ops.power(keras.ops.cast(beta, dtype), step)
        for beta in (optimizer.beta_1, optimizer.beta_2)
    )
    return keras.ops.cast(learning_rate, dtype) * keras.ops.sqrt(second) / first


@replaces_value(
    f"{keras_private.NADAM}:core",
    reason="Reads a product of its state on the host at each step, where a trace does not see it.",
)
def numbers_of_nadam(capture: StepCapture[torch.Tensor], original: ModuleType) -> "NumbersOfNadam":
    """Replaces Keras' module `core` for Nadam."""
    return NumbersOfNadam(original, capture)


@attrs.frozen
class NumbersOfNadam:
    """Replaces Keras' module `core` for Nadam: in a trace a number stays a tensor."""

    core: Any
    capture: StepCapture[torch.Tensor]

    def convert_to_numpy(self, number: torch.Tensor) -> Any:
        """Returns `number`, a divisor: as a tensor it gives bitwise equal results."""
        return number if self.capture.is_recording() else self.core.convert_to_numpy(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)
