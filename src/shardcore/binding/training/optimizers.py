"""Patches: updates of optimizers: `Adam` in one call of torch, loss scaling without the host.

A number of `Nadam` stays a tensor in a trace.
"""

import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs
import keras
import torch
from keras.optimizers import LossScaleOptimizer
from torch.optim.adam import adam

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import Original
from shardcore.ports.capture import StepCapture
from shardcore.ports.types import OpenUpdateOnDevice, UpdateOnDevice
from shardcore.reporting.logs import log_of

logger = log_of("training")


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

    It ignores strides and shapes, so all must be contiguous, and the moments of a variable must
    have its shape: Keras raises for others. They must have its layout; a strategy may shard them
    further. A compiled step keeps the operators of Keras, which Inductor
    fuses; it has no code for the fused update (ADR 25).
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
    """Tells whether all are contiguous, and the moments of a variable have its shape and layout."""
    if not all(tensor.is_contiguous() for tensors in (values, *moments) for tensor in tensors):
        return False
    pairs = [pair for tensors in moments if tensors for pair in zip(values, tensors, strict=True)]
    if any(value.shape != moment.shape for value, moment in pairs):
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
    """Multiplies the learning rate by the bias correction of both moments, as Keras does."""
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
def numbers_of_nadam(capture: StepCapture[torch.Tensor], original: ModuleType) -> "_NumbersOfNadam":
    """Replaces Keras' module `core` for Nadam."""
    return _NumbersOfNadam(original, capture)


@attrs.frozen
class _NumbersOfNadam:
    """Replaces Keras' module `core` for Nadam: in a trace a number stays a tensor."""

    core: Any
    capture: StepCapture[torch.Tensor]

    def convert_to_numpy(self, number: torch.Tensor) -> Any:
        # It is a divisor: as a tensor it gives bitwise equal results.
        return number if self.capture.is_recording() else self.core.convert_to_numpy(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


@attrs.frozen(eq=False)
class LossScaling:
    """Updates of a `LossScaleOptimizer`, which read nothing on the host (ADR 56).

    Keras asks on the host whether all gradients are finite, and then takes a branch. Here both
    branches run, and tensors on the device choose which writes count.
    """

    sessions: Sessions
    update_on_device: OpenUpdateOnDevice[torch.Tensor]
    _logged: "weakref.WeakSet[LossScaleOptimizer]" = attrs.field(
        factory=weakref.WeakSet, init=False
    )
    # Of a thread: in its attribute `update` the one that it runs.
    _thread: threading.local = attrs.field(factory=threading.local, init=False)

    @replaces(
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._common_apply",
        reason="Reads on the host whether all gradients are finite.",
    )
    def update(
        self,
        original: Original,
        optimizer: LossScaleOptimizer,
        grads: list[torch.Tensor | None],
        trainable_variables: list[keras.Variable] | None = None,
    ) -> None:
        """Replaces `LossScaleOptimizer._common_apply`, which reads whether gradients are finite.

        Python code of the user may do more than write into tensors: it runs in Keras' branches.
        """
        users, is_served = keras_private.code_of_user(optimizer), self.sessions.are_served()
        if users and is_served and optimizer not in self._logged:
            self._logged.add(optimizer)
            logger.info(
                "%s of optimizer %r is not Keras' own, so the loss scale is decided on the host: "
                "each step reads there whether all gradients are finite.",
                users,
                optimizer.inner_optimizer.name,
            )
        if users or not is_served:
            original(optimizer, grads, trainable_variables)
            return
        with self.update_on_device() as self._thread.update:
            try:
                original(optimizer, grads, trainable_variables)
            finally:
                del self._thread.update

    @replaces(
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite",
        reason="Makes four tensors of the size of each gradient.",
    )
    def check_finite(
        self, original: Original, optimizer: LossScaleOptimizer, grads: list[torch.Tensor | None]
    ) -> Any:
        """Replaces `check_finite`: `0.0 * inf` is `nan`, and so is the sum, reduced with others."""
        gradients = [gradient for gradient in grads if gradient is not None]
        if not gradients or not hasattr(self._thread, "update"):
            return original(optimizer, grads)
        sums = [(gradient * 0.0).sum() for gradient in gradients]
        return torch.isfinite(torch.stack(sums)).all()

    @replaces(
        "keras.src.backend.torch.core:cond",
        reason="Reads its predicate on the host, in the update of a LossScaleOptimizer too.",
        everywhere=True,
    )
    def cond(
        self,
        original: Original,
        pred: object,
        true_fn: Callable[[], Any],
        false_fn: Callable[[], Any],
    ) -> Any:
        """Replaces `cond` in an update: both functions run, and `pred` chooses what stays."""
        update: UpdateOnDevice[torch.Tensor] | None = getattr(self._thread, "update", None)
        if update is None or not isinstance(pred, torch.Tensor):
            return original(pred, true_fn, false_fn)
        strategy = self.sessions.strategy_of_tensor(pred)
        is_true = pred if strategy is None else strategy.full_tensor(pred)
        with update.where(is_true):
            if_true = true_fn()
        with update.where(~is_true):
            if_false = false_fn()
        return keras_private.map_pairs(
            lambda one, other: torch.where(is_true, one, other), if_true, if_false
        )
