"""Puts every seam in place, and takes every one back."""

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attrs

from shardcore.binding import layout_map, sample_weights, seams
from shardcore.binding.backend_library import BackendLibrary
from shardcore.binding.callback_files import OneWriter, one_summary, refuse_orbax, send_once
from shardcore.binding.data_adapters import OneProcess, array_loader
from shardcore.binding.exporting import export
from shardcore.binding.layers import LayerEdges, initial_states, layer_call
from shardcore.binding.operations import one_sample_a_row, scatter_at_once
from shardcore.binding.optimizers import NumbersOfNadam, fused_update
from shardcore.binding.packed_kernels import int4_build
from shardcore.binding.random_generators import draw, generator
from shardcore.binding.reading import to_numpy
from shardcore.binding.saving import Saving
from shardcore.binding.session import Sessions
from shardcore.binding.steps import Steps
from shardcore.binding.torch_modules import TorchModules
from shardcore.binding.unread import results_of_epoch
from shardcore.binding.variable import VariableSeam
from shardcore.domain.errors import StrategyError
from shardcore.ports.capture import StepCapture
from shardcore.ports.processes import Processes
from shardcore.ports.strategy import StrategyEntry


@attrs.frozen(eq=False)
class Binding:
    """Keras with shardcore in it, until `remove()`.

    Args:
        entry: The strategy that keeps variables.
        processes: The job of this process.
        capture: Makes programs of steps.
    """

    entry: StrategyEntry
    processes: Processes
    capture: StepCapture
    sessions: Sessions = attrs.field(init=False)
    library: BackendLibrary = attrs.field(init=False)
    _rebinding: seams.Rebinding = attrs.field(factory=seams.Rebinding, init=False)
    _ambient: threading.local = attrs.field(factory=threading.local, init=False)
    _inside: "weakref.WeakSet[threading.Thread]" = attrs.field(factory=weakref.WeakSet, init=False)

    @sessions.default
    def _make_sessions(self) -> Sessions:
        return Sessions(self.entry, self.processes)

    @library.default
    def _make_library(self) -> BackendLibrary:
        return BackendLibrary(self.processes, self.sessions)

    def put(self) -> None:
        """Replace every name of the seam table; all or none."""
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
        """Put every name back. The distribution is unset: Keras could do nothing with it.

        Raises:
            StrategyError: If another thread is in the scope of a distribution, or a model is
                being trained, evaluated or asked.
        """
        self._check_threads()
        self._check_work()
        seams.forget_distribution()
        self._leave_scope()
        self._rebinding.restore()
        self.sessions.close()

    def _replacements(self) -> dict[str, Callable[[Any], Any]]:
        variable = VariableSeam(self.sessions)
        steps = Steps(self.sessions, self.capture)
        saving = Saving(self.sessions)
        torch_modules = TorchModules(self.sessions)
        return {
            "backend library": lambda _: self.library,
            "distribution library": lambda _: self.library,
            "distribution attribute": self._set_global_attribute,
            "clear_session": self._clear_session,
            "layout axes": layout_map.validate_axes,
            "layout map lookup": layout_map.lookup,
            "layout map rule": layout_map.add_rule,
            "variable initialize": variable.initialize,
            "variable assign": variable.assign,
            "variable repr": variable.represent,
            "convert_to_numpy": lambda original: to_numpy(original, self.sessions),
            "layer call": lambda original: layer_call(original, self.sessions),
            "layer edges": lambda _: LayerEdges(self.sessions),
            "torch module parameters": torch_modules.track,
            "torch module config": torch_modules.config,
            "packed kernel": lambda original: int4_build(original, self.sessions),
            "data adapters": lambda _: OneProcess(),
            "array batches": lambda original: array_loader(original, self.sessions),
            **{f"scope of {name}": steps.within_scope for name in seams.RUNS},
            "beginning of an epoch": steps.begin,
            "epoch": steps.epoch,
            **{f"{kind} step": steps.maker(kind) for kind in seams.STEPS},
            "automatic compilation": lambda _: lambda trainer: seams.AUTO,
            "metric results": self.sessions.sums.before,
            "results of an epoch": results_of_epoch,
            "callbacks of train steps": lambda original: steps.callbacks(original, "train"),
            "callbacks of test steps": lambda original: steps.callbacks(original, "test"),
            "compilation": steps.compilation,
            "random generator": lambda original: generator(original, self.sessions, self.capture),
            **{
                name: lambda original: draw(original, self.sessions, self.capture)
                for name in seams.SEAMS
                if name.startswith("draws of ")
            },
            "update of Adam": lambda original: fused_update(original, self.sessions),
            "numbers of Nadam": lambda core: NumbersOfNadam(core, self.capture),
            "scatter": scatter_at_once,
            "classes of a loss": lambda original: one_sample_a_row(original, self.sessions),
            "initial states": lambda original: initial_states(original, self.sessions),
            "mask of a loss": lambda original: sample_weights.mask(original, self.sessions),
            "export": lambda original: export(original, self.sessions),
            "save model": saving.save_model,
            "save weights": saving.save_weights,
            "overwrite question": saving.ask,
            **{
                name: lambda file_utils: OneWriter(file_utils, self.sessions)
                for name in seams.SEAMS
                if name.startswith("files of ")
            },
            "summaries": lambda original: one_summary(original, self.sessions),
            "remote monitor": lambda original: send_once(original, self.sessions),
            "orbax": lambda original: refuse_orbax(original, self.sessions),
            "messages": saving.message,
            "progress bar": steps.progress,
        }

    def _set_global_attribute(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_global_attribute(name: str, value: Any) -> None:
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

        return set_global_attribute

    def _clear_session(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def clear_session(free_memory: bool = True) -> None:
            original(free_memory)
            self.follow_distribution()

        return clear_session

    def follow_distribution(self) -> None:
        """Be in the scope of the distribution that is set on this thread, and in no other."""
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
        """Keras would go on with torch's own operators, of which some are wrong on shards."""
        for run in self.sessions.at_work[:1]:
            name = run.trainer.name
            raise StrategyError(
                f"uninstall() was called, by a callback for instance, while model {name!r} "
                "is in fit, evaluate, predict or a step: call it when that has returned."
            )

    def _check_threads(self) -> None:
        """What torch and Keras keep by thread cannot be taken back from another one."""
        here = threading.current_thread()
        others = [each.name for each in self._inside if each is not here and each.is_alive()]
        if others:
            raise StrategyError(
                f"uninstall() was called while thread {others[0]!r} has a distribution: leave its "
                "scope there, or set_distribution(None), first."
            )
