"""The binding: installs all patches into Keras, and removes them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private, patch_table
from shardcore.binding.backend_library import BackendLibrary
from shardcore.binding.capture.generation import WhileLoops
from shardcore.binding.checkpoints.files.exports import TransformersExport
from shardcore.binding.keras_private.patches import Replacement
from shardcore.binding.ranks.ambient import AmbientScope
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.training import loops
from shardcore.binding.training.ends import Ends
from shardcore.binding.training.optimizers import LossScaling
from shardcore.binding.training.steps import Steps
from shardcore.binding.types import Original
from shardcore.domain.errors import CallProblem
from shardcore.ports.capture import StepCapture
from shardcore.ports.strategy import StrategyEntry
from shardcore.ports.types import OpenUpdateOnDevice
from shardcore.ports.world import Processes


@attrs.frozen(eq=False)
class Binding:
    """The patches in Keras, from `put()` to `remove()`."""

    entry: StrategyEntry
    processes: Processes
    capture: StepCapture[torch.Tensor]
    update_on_device: OpenUpdateOnDevice[torch.Tensor]
    sessions: Sessions = attrs.field(init=False)
    library: BackendLibrary = attrs.field(init=False)
    _ambient: AmbientScope = attrs.field(init=False)
    _undo: ExitStack = attrs.field(factory=ExitStack, init=False)

    @sessions.default
    def _make_sessions(self) -> Sessions:
        return Sessions(self.entry, self.processes)

    @library.default
    def _make_library(self) -> BackendLibrary:
        return BackendLibrary(self.processes, self.sessions)

    @_ambient.default
    def _make_ambient(self) -> AmbientScope:
        return AmbientScope(self.sessions)

    def put(self) -> None:
        """Replaces every name of the patch table; all or none."""
        owners = self._owners()
        with ExitStack() as undo:
            for replacement in patch_table.INSTALLED:
                if replacement.patch.is_needed:
                    function = self._with_services(replacement, owners)
                    keras_private.replace(replacement.patch, function, undo)
            self._ambient.follow()
            loops.follow_torch_optimizers(self.sessions, undo)
            self._undo.push(undo.pop_all())
        exports = TransformersExport(self.sessions).replacements()
        keras_private.change_exporter(exports, self._undo)

    def remove(self) -> None:
        """Restores every name, and unsets the distribution, which Keras alone could not use."""
        self._ambient.check_threads()
        self._check_work()
        keras.distribution.set_distribution(None)
        self._ambient.leave()
        self._undo.close()
        self.sessions.close()

    def _owners(self) -> dict[type, object]:
        sessions, capture = self.sessions, self.capture
        owners = (
            *(self.library, self._ambient, sessions.sums),
            *(Steps(sessions, capture), Ends(sessions), WhileLoops(sessions, capture)),
            LossScaling(sessions, self.update_on_device),
        )
        return {type(owner): owner for owner in owners}

    def _with_services(
        self, replacement: Replacement, owners: dict[type, object]
    ) -> Callable[..., Any]:
        """Binds what the function of `replacement` needs before `original`."""
        if replacement.needs == ("session",):
            return partial(self._in_session, replacement.function)
        services: dict[str, object] = {
            "sessions": self.sessions,
            "capture": self.capture,
            "name": replacement.patch.last,
        }
        if replacement.owner is not None:
            services["self"] = owners[replacement.owner]
        return partial(replacement.function, *(services[need] for need in replacement.needs))

    def _in_session(
        self,
        replacement: Callable[..., object],
        original: Original,
        *args: object,
        **kwargs: object,
    ) -> Any:
        session = self.sessions.current()
        if session is None:
            return original(*args, **kwargs)
        return replacement(session, original, *args, **kwargs)

    def _check_work(self) -> None:
        """Refuses while a model runs: Keras would run torch's operators on sharded tensors."""
        for run in self.sessions.runs[:1]:
            name = run.trainer.name
            raise CallProblem(
                f"uninstall() was called, by a callback for instance, while model {name!r} "
                "is in fit, evaluate, predict or a step: call it when that has returned.",
                name=name,
            )
