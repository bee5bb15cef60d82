"""The binding: installs all patches into Keras, and removes them."""

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private, layout_map
from shardcore.binding.backend_library import BackendLibrary
from shardcore.binding.checkpoints import backup
from shardcore.binding.context.session import Sessions
from shardcore.binding.data import batches
from shardcore.binding.data.data_adapters import array_loader
from shardcore.binding.files import callbacks, loading, saving
from shardcore.binding.files.transformers import TransformersExport
from shardcore.binding.keras_private import table
from shardcore.binding.layers import calls, operations, products, slices
from shardcore.binding.layers.while_loops import WhileLoops
from shardcore.binding.metric_sums import results_of_epoch
from shardcore.binding.torch_modules import wrapper
from shardcore.binding.training import loops
from shardcore.binding.training.ends import Ends
from shardcore.binding.training.loss_scaling import LossScaling
from shardcore.binding.training.steps import Steps
from shardcore.binding.types import Original
from shardcore.binding.variables import adoption, initial, quantized, variable
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
    _undo: ExitStack = attrs.field(factory=ExitStack, init=False)
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
        """Replaces every name of the patch table; all or none."""
        replacements = self._replacements()
        assert replacements.keys() == {patch.key for patch in table.ALL}
        with ExitStack() as undo:
            for key, patch in table.PATCHES.items():
                keras_private.replace(patch, replacements[key], undo)
            self.follow_distribution()
            loops.follow_torch_optimizers(self.sessions, undo)
            self._undo.push(undo.pop_all())
        exports = TransformersExport(self.sessions).replacements()
        keras_private.change_exporter(exports, self._undo)

    def remove(self) -> None:
        """Restores every name, and unsets the distribution, which Keras alone could not use."""
        self._check_threads()
        self._check_work()
        keras.distribution.set_distribution(None)
        self._leave_scope()
        self._undo.close()
        self.sessions.close()

    def _replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Returns, by the keys of the patch table, the functions from old to new values."""
        sessions, capture = self.sessions, self.capture
        steps, ends = Steps(sessions, capture), Ends(sessions)
        loss_scaling = LossScaling(sessions, self.update_on_device)
        values: dict[str, Callable[[Any], Any]] = {
            "backend.distribution_lib": lambda _: self.library,
            "distribution_lib.distribution_lib": lambda _: self.library,
            "layer.distribution_lib": lambda _: calls.LayerEdges(sessions),
            **{
                f"{module}.distribution_lib": lambda _: SimpleNamespace(distribution=lambda: None)
                for module in ("data_adapters", *table.ADAPTERS)
            },
            "ModelParallel.num_model_replicas": lambda _: property(layout_map.model_replicas),
            "trainer.distribution": lambda _: lambda: None,
            "DTensor": lambda _: SimpleNamespace,  # of which no tensor is an instance
            "Variable._initialize_distributed": lambda _: lambda variable, value: None,
            "TorchTrainer._initialize_ddp": lambda _: lambda trainer: None,
            "saving_lib.zipfile": partial(loading.archives, sessions),
            "torch_nadam.core": lambda core: operations.NumbersOfNadam(core, capture),
            "TensorBoard.summary": partial(callbacks.one_summary, sessions),
            **{
                f"{name}.file_utils": partial(callbacks.OneWriter, sessions)
                for name in table.CALLBACKS_WITH_FILES
            },
            "backup_and_restore.file_utils": partial(
                callbacks.OneWriter, sessions, is_renamed=True
            ),
        }
        # Each is called with the function that it replaces, and with its arguments.
        functions: dict[str, Callable[..., Any]] = {
            "global_state.set_global_attribute": self._set_global_attribute,
            "global_state.clear_session": self._clear_session,
            "TensorLayout._validate_axes": layout_map.validate_axes,
            "LayoutMap.__getitem__": layout_map.lookup,
            "LayoutMap.__setitem__": layout_map.add_rule,
            "ModelParallel.__init__": layout_map.create_model_parallel,
            "Variable.__init__": variable.keep_layout,
            "Variable._convert_to_tensor": partial(loading.without_copy, sessions),
            "Variable._direct_assign": partial(adoption.assign, sessions),
            "Variable._initialize_with_initializer": partial(initial.initialize, sessions),
            **{f"random.{name}": partial(initial.draw, sessions) for name in table.INITIAL_DRAWS},
            **{
                f"quantizers.{name}": partial(quantized.in_pieces, sessions)
                for name in table.QUANTIZERS
            },
            "AutocastScope.maybe_cast": variable.cast,
            "Variable.__repr__": variable.represent,
            "core.convert_to_numpy": partial(variable.to_numpy, sessions),
            "Layer.__call__": partial(calls.layer_call, sessions),
            "TorchModuleWrapper._track_module_parameters": partial(wrapper.track, sessions),
            "TorchModuleWrapper.get_config": partial(wrapper.config, sessions),
            **{f"TorchTrainer.{name}": steps.within_scope for name in table.RUNS},
            **{
                f"TorchTrainer.make_{kind}_function": partial(steps.make, kind)
                for kind in table.STEPS
            },
            **{
                f"CallbackList.on_{phase}_begin": partial(steps.callbacks, phase)
                for phase in table.PHASES
            },
            "CallbackList.on_train_batch_end": ends.batch_end,
            "CallbackList.on_epoch_end": ends.epoch_end,
            "CallbackList.on_train_end": ends.train_end,
            "EpochIterator.__iter__": steps.begin,
            "TorchEpochIterator._get_iterator": steps.epoch,
            "Trainer._resolve_auto_jit_compile": lambda original, trainer: keras_private.AUTO,
            "Trainer._get_metrics_result_or_logs": results_of_epoch,
            "TorchTrainer.get_metrics_result": sessions.sums.results,
            "TorchTrainer._should_torch_compile": steps.compilation,
            "random.torch_seed_generator": partial(operations.generator, sessions, capture),
            **{
                f"random.{name}": partial(operations.draw, sessions, capture)
                for name in table.DRAWS
            },
            "core.remat": partial(operations.remat, capture),
            "Adam._parallel_update_step": partial(operations.fused_update, sessions),
            "LossScaleOptimizer._common_apply": loss_scaling.update,
            "LossScaleOptimizer.check_finite": loss_scaling.check_finite,
            "core.cond": loss_scaling.cond,
            "core.scatter": operations.scatter,
            "nn._transpose_spatial_inputs": operations.with_channels_first,
            "core.while_loop": WhileLoops(sessions, capture).run,
            "nn.sparse_categorical_crossentropy": partial(operations.sparse_crossentropy, sessions),
            "BaseOptimizer.apply": partial(loops.keras_update, sessions),
            "Loss.__call__": partial(loops.loss, sessions),
            "loss.apply_mask": partial(batches.mask, sessions),
            "Model.export": partial(saving.export, sessions),
            "saving_lib.save_model": partial(saving.save_model, sessions),
            "legacy_h5_format.save_model_to_hdf5": partial(saving.save_legacy, sessions),
            "H5IOStore.__init__": partial(saving.open_store, sessions),
            "H5IOStore.close": partial(saving.close_store, sessions),
            "saving_lib.save_weights_only": partial(saving.save_weights, sessions),
            **{
                method: partial(replace, sessions)
                for replace, writers in (
                    (callbacks.write_on_all_ranks, table.WRITERS),
                    (callbacks.defer_write_error, table.STEP_WRITERS),
                )
                for methods in writers.values()
                for method in methods
            },
            "BackupAndRestore._save_model": partial(backup.save, sessions),
            "BackupAndRestore._load_model": partial(backup.load, sessions),
            "BackupAndRestore.on_epoch_end": partial(backup.end_epoch, sessions),
            "BackupAndRestore.on_train_begin": partial(callbacks.write_once_per_path, sessions),
            "RemoteMonitor.on_epoch_end": partial(callbacks.send_once, sessions),
            "io_utils.print_msg": partial(callbacks.print_once, sessions),
            "summary_utils.print_summary": partial(callbacks.summarize_once, sessions),
            "ProgbarLogger.set_params": partial(callbacks.show_once, sessions),
        }
        # Likewise, with the session first; without a session the replaced function runs.
        in_session: dict[str, Callable[..., Any]] = {
            "Variable._initialize": variable.initialize,
            "EinsumDense.quantized_build": calls.quantized_build,
            "ArrayDataAdapter.get_torch_dataloader": array_loader,
            "RNN.get_initial_state": calls.initial_states,
            "Functional._standardize_inputs": calls.model_inputs,
            "core.slice": slices.slice_tensor,
            "numpy.repeat": operations.repeat,
            "math.segment_sum": operations.segment_sum,
            "numpy.einsum": products.einsum,
            "core.slice_update": slices.update,
            "saving_lib.is_memory_sufficient": loading.is_memory_sufficient,
            "io_utils.ask_to_proceed_with_overwrite": saving.ask_on_rank_0,
            "OrbaxCheckpoint.set_model": callbacks.refuse_orbax,
        }
        functions |= {
            name: partial(self._in_session, function) for name, function in in_session.items()
        }
        return values | {
            name: keras_private.wrap_calls(function) for name, function in functions.items()
        }

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

    def _set_global_attribute(self, original: Original, name: str, value: object) -> None:
        if name != keras_private.CURRENT_DISTRIBUTION:
            original(name, value)
            return
        if self.sessions.planning is threading.current_thread():
            return
        before = keras.distribution.distribution()
        original(name, value)
        try:
            self.follow_distribution()
        except BaseException:
            original(name, before)
            self.follow_distribution()
            raise

    def _clear_session(self, original: Original, free_memory: bool = True) -> None:
        original(free_memory)
        self.follow_distribution()

    def follow_distribution(self) -> None:
        """Enters the scope of the distribution that is set on this thread, and no other."""
        self._leave_scope()
        session = self.sessions.current()
        if session is not None:
            self._ambient.scope = ExitStack()
            self._ambient.scope.enter_context(session.strategy.implicit_replication())
            self._inside.add(threading.current_thread())

    def _leave_scope(self) -> None:
        scope = getattr(self._ambient, "scope", None)
        if scope is not None:
            self._ambient.scope = None
            self._inside.discard(threading.current_thread())
            scope.close()

    def _check_work(self) -> None:
        """Refuses while a model runs: Keras would run torch's operators on sharded tensors."""
        for run in self.sessions.runs[:1]:
            name = run.trainer.name
            raise CallProblem(
                f"uninstall() was called, by a callback for instance, while model {name!r} "
                "is in fit, evaluate, predict or a step: call it when that has returned."
            )

    def _check_threads(self) -> None:
        """Refuses while another thread has a distribution: its state cannot be reset from here."""
        here = threading.current_thread()
        others = [
            thread.name for thread in self._inside if thread is not here and thread.is_alive()
        ]
        if others:
            raise CallProblem(
                f"uninstall() was called while thread {others[0]!r} has a distribution: leave its "
                "scope there, or set_distribution(None), first."
            )
