"""The binding: installs all seams into Keras, and removes them."""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from shardcore.binding import (
    callback_files,
    layers,
    layout_map,
    operations,
    sample_weights,
    saving,
    seams,
    torch_modules,
    variable,
)
from shardcore.binding.backend_library import BackendLibrary
from shardcore.binding.data_adapters import array_loader
from shardcore.binding.session import Sessions
from shardcore.binding.steps import Steps
from shardcore.binding.unread import results_of_epoch
from shardcore.domain.errors import StrategyError
from shardcore.ports.capture import StepCapture
from shardcore.ports.strategy import StrategyEntry
from shardcore.ports.world import Processes


@attrs.frozen(eq=False)
class Binding:
    """The seams in Keras, from `put()` to `remove()`."""

    entry: StrategyEntry
    processes: Processes
    capture: StepCapture[torch.Tensor]
    sessions: Sessions = attrs.field(init=False)
    library: BackendLibrary = attrs.field(init=False)
    _rebinding: seams.Rebinding = attrs.field(factory=seams.Rebinding, init=False)
    # Of a thread: at the exit of the process no scope is closed after torch is unloaded.
    _ambient: threading.local = attrs.field(factory=threading.local, init=False)
    _inside: "weakref.WeakSet[threading.Thread]" = attrs.field(factory=weakref.WeakSet, init=False)

    @sessions.default
    def _make_sessions(self) -> Sessions:
        return Sessions(self.entry, self.processes)

    @library.default
    def _make_library(self) -> BackendLibrary:
        return BackendLibrary(self.processes, self.sessions)

    def put(self) -> None:
        """Replaces every name of the seam table; all or none."""
        replacements = self._replacements()
        assert replacements.keys() == seams.SEAMS.keys()
        try:
            for name, make in replacements.items():
                self._rebinding.replace(seams.SEAMS[name], make)
        except BaseException:
            self._rebinding.restore()
            raise
        self.follow_distribution()

    def remove(self) -> None:
        """Restores every name, and unsets the distribution, which Keras alone could not use.

        Raises:
            StrategyError: If another thread is in the scope of a distribution, or a model runs
                fit, evaluate, predict or a step.
        """
        self._check_threads()
        self._check_work()
        seams.forget_distribution()
        self._leave_scope()
        self._rebinding.restore()
        self.sessions.close()

    def _replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Returns, by the keys of the seam table, the functions from old to new values."""
        sessions, capture = self.sessions, self.capture
        steps = Steps(sessions, capture)
        values: dict[str, Callable[[Any], Any]] = {
            "backend library": lambda _: self.library,
            "distribution library": lambda _: self.library,
            "layer edges": lambda _: layers.LayerEdges(sessions),
            "data adapters": lambda _: SimpleNamespace(distribution=lambda: None),
            "numbers of Nadam": lambda core: operations.NumbersOfNadam(core, capture),
            "results of an epoch": results_of_epoch,
            "summaries": partial(callback_files.one_summary, sessions),
            **{
                f"files of {name}": partial(callback_files.OneWriter, sessions)
                for name in seams.CALLBACKS_WITH_FILES
            },
        }
        # Each is called with the function that it replaces, and with its arguments.
        functions: dict[str, Callable[..., Any]] = {
            "distribution attribute": self._set_global_attribute,
            "clear_session": self._clear_session,
            "layout axes": layout_map.validate_axes,
            "layout map lookup": layout_map.lookup,
            "layout map rule": layout_map.add_rule,
            "variable assign": partial(variable.assign, sessions),
            "variable repr": variable.represent,
            "convert_to_numpy": partial(variable.to_numpy, sessions),
            "layer call": partial(layers.layer_call, sessions),
            "torch module parameters": partial(torch_modules.track, sessions),
            "torch module config": partial(torch_modules.config, sessions),
            **{f"scope of {name}": steps.within_scope for name in seams.RUNS},
            **{f"{kind} step": partial(steps.make, kind) for kind in seams.STEPS},
            **{
                f"callbacks of {phase} steps": partial(steps.callbacks, phase)
                for phase in seams.PHASES
            },
            "automatic compilation": lambda original, trainer: seams.AUTO,
            "metric results": sessions.sums.results,
            "compilation": steps.compilation,
            "random generator": partial(operations.generator, sessions, capture),
            **{
                f"draws of {name}": partial(operations.draw, sessions, capture)
                for name in seams.DRAWS
            },
            "update of Adam": partial(operations.fused_update, sessions),
            "scatter": operations.scatter,
            "classes of a loss": partial(operations.sparse_crossentropy, sessions),
            "export": partial(saving.export, sessions),
            "save model": partial(saving.save_model, sessions),
            "save weights": partial(saving.save_weights, sessions),
            "remote monitor": partial(callback_files.send_once, sessions),
            "messages": partial(callback_files.print_once, sessions),
            "progress bar": partial(callback_files.show_once, sessions),
        }
        # Likewise, with the session first; without a session the replaced function runs.
        in_session: dict[str, Callable[..., Any]] = {
            "variable initialize": variable.initialize,
            "packed kernel": layers.int4_build,
            "array batches": array_loader,
            "beginning of an epoch": steps.begin,
            "epoch": steps.epoch,
            "initial states": layers.initial_states,
            "mask of a loss": sample_weights.mask,
            "overwrite question": saving.ask,
            "orbax": callback_files.refuse_orbax,
        }
        functions |= {name: partial(self._in_session, each) for name, each in in_session.items()}
        return values | {name: seams.around(each) for name, each in functions.items()}

    def _in_session(
        self,
        replacement: Callable[..., Any],
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        session = self.sessions.current()
        if session is None:
            return original(*args, **kwargs)
        return replacement(session, original, *args, **kwargs)

    def _set_global_attribute(self, original: Callable[..., None], name: str, value: Any) -> None:
        if name != seams.CURRENT_DISTRIBUTION:
            original(name, value)
            return
        before = seams.current_distribution()
        original(name, value)
        try:
            self.follow_distribution()
        except BaseException:
            original(name, before)
            self.follow_distribution()
            raise

    def _clear_session(self, original: Callable[..., None], free_memory: bool = True) -> None:
        original(free_memory)
        self.follow_distribution()

    def follow_distribution(self) -> None:
        """Enters the scope of the distribution that is set on this thread, and no other."""
        self._leave_scope()
        session = self.sessions.current()
        if session is not None:
            self._ambient.scope = ExitStack()
            self._ambient.scope.enter_context(session.strategy.scope())
            self._inside.add(threading.current_thread())

    def _leave_scope(self) -> None:
        scope = getattr(self._ambient, "scope", None)
        if scope is not None:
            self._ambient.scope = None
            self._inside.discard(threading.current_thread())
            scope.close()

    def _check_work(self) -> None:
        """Refuses while a model runs: Keras would run torch's operators on sharded tensors."""
        for run in self.sessions.at_work[:1]:
            name = run.trainer.name
            raise StrategyError(
                f"uninstall() was called, by a callback for instance, while model {name!r} "
                "is in fit, evaluate, predict or a step: call it when that has returned."
            )

    def _check_threads(self) -> None:
        """Refuses while another thread has a distribution: its state cannot be reset from here."""
        here = threading.current_thread()
        others = [each.name for each in self._inside if each is not here and each.is_alive()]
        if others:
            raise StrategyError(
                f"uninstall() was called while thread {others[0]!r} has a distribution: leave its "
                "scope there, or set_distribution(None), first."
            )
