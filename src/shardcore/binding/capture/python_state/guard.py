"""The guard of a captured step: Python still holds what it held at the recording (ADR 55)."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.binding.capture.python_state.walk import watch_state
from shardcore.binding.capture.python_state.watched import (
    Change,
    WatchedValues,
    memories,
    memory_of,
)
from shardcore.binding.capture.signatures import Closures, keeps_casts
from shardcore.domain.capture import NotCaptured
from shardcore.ports.capture import StepCapture


@attrs.frozen
class PythonGuard:
    """The Python state that the code of a step read when it was recorded.

    Args:
        watched: The values.
        memories: Where in memory the watched tensors are.
        functions: The number of functions that steps had called.
    """

    watched: WatchedValues
    memories: frozenset[Any]
    functions: int

    @classmethod
    def of(
        cls,
        trainer: Any,
        called: ObservedCalls,
        capture: StepCapture[torch.Tensor],
        local: Callable[[Any], Any],
        closures: Closures | None = None,
    ) -> "PythonGuard":
        """Walks from `trainer` to its layers, optimizer, metrics and losses, and what they hold.

        Args:
            trainer: The model.
            called: The functions that its steps call.
            capture: Knows the hooks of torch.
            local: Returns this rank's plain tensor of a tensor.
            closures: The closures of the step, if each call makes another function.

        Raises:
            NotCaptured: If the step reads what cannot be compared.
        """
        if any(capture.hook_registries()):
            raise NotCaptured(
                "all torch modules have a hook, which a captured step would not call: remove it"
            )
        if hook := keras_private.hook_of(trainer, capture.hooks_of):
            raise NotCaptured(
                f"{hook} has a hook, which a captured step would not call: call it in the layer"
            )
        watched = watch_state(trainer, called, capture, closures)
        for registry in capture.hook_registries():
            watched.add_size(registry, "a hook of all torch modules")
        watched.seal()
        return cls(watched, memories(watched.tensors, local), called.count)

    def check_holds(self, tensors: Iterable[object]) -> None:
        """Checks that an attribute or a container holds `tensors`, which a program reads.

        A change of any other would not be seen.

        Raises:
            NotCaptured: If nothing holds one of them.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or memory_of(tensor) in self.memories:
                continue
            if keeps_casts():
                raise NotCaptured(
                    "autocast keeps what it has cast of a weight, which steps in the same scope "
                    "read: use torch.autocast(..., cache_enabled=False)"
                )
            raise NotCaptured(
                f"it reads a tensor of shape {tuple(tensor.shape)} that no variable, torch module "
                "or attribute of a layer holds: make it an attribute of the layer"
            )

    def change(self) -> Change | None:
        """Finds the first change; None if there is none."""
        return None if self.watched.is_unchanged() else next(iter(self.watched.changes()), None)
