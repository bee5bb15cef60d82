"""Patches: the update of a `LossScaleOptimizer`, which reads nothing on the host (ADR 56).

Keras asks on the host whether all gradients are finite, and then takes a branch. Here both branches
run, and tensors on the device choose which writes count.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import keras
import torch
from keras.optimizers import LossScaleOptimizer

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import Original
from shardcore.ports.types import OpenUpdateOnDevice, UpdateOnDevice
from shardcore.reporting.logs import log_of

logger = log_of("training")


@attrs.frozen(eq=False)
class LossScaling:
    """The names of Keras that are replaced for updates of a `LossScaleOptimizer`."""

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
        users = keras_private.code_of_user(optimizer)
        if users:
            self._log_once(optimizer, users)
        if users or not self.sessions.are_served():
            original(optimizer, grads, trainable_variables)
            return
        with self.update_on_device() as self._thread.update:
            try:
                original(optimizer, grads, trainable_variables)
            finally:
                del self._thread.update

    def _log_once(self, optimizer: LossScaleOptimizer, users: str) -> None:
        if optimizer not in self._logged and self.sessions.are_served():
            self._logged.add(optimizer)
            logger.info(
                "%s of optimizer %r is not Keras' own, so the loss scale is decided on the host: "
                "each step reads there whether all gradients are finite.",
                users,
                optimizer.inner_optimizer.name,
            )

    @replaces(
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite",
        reason="Makes four tensors of the size of each gradient.",
    )
    def check_finite(
        self, original: Original, optimizer: LossScaleOptimizer, grads: list[torch.Tensor | None]
    ) -> Any:
        """Replaces `check_finite`, which makes four tensors of the size of each gradient.

        `0.0 * inf` and `0.0 * nan` are `nan`, and so is the sum, which ranks reduce with others.
        """
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
