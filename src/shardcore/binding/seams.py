"""Every Keras name that shardcore replaces or reads, with the reason: the only such place.

Known for Keras 3.15 on torch. `Rebinding` replaces names and puts each of them back.
"""

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import copy
from types import ModuleType
from typing import Any

import attrs
import numpy
import torch
from keras.src import backend, optimizers, tree
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.torch import core as torch_core
from keras.src.backend.torch import trainer as torch_trainer
from keras.src.backend.torch.optimizers import torch_nadam
from keras.src.callbacks import (
    BackupAndRestore,
    Callback,
    CallbackList,
    ModelCheckpoint,
    ProgbarLogger,
    remote_monitor,
)
from keras.src.distribution import distribution_lib
from keras.src.layers.layer import Layer
from keras.src.ops.node import Node
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import file_utils, io_utils, rng_utils
from keras.src.utils.python_utils import is_default

KERAS_VERSIONS = ("3.15",)

CURRENT_DISTRIBUTION: str = distribution_lib.GLOBAL_ATTRIBUTE_NAME


@attrs.frozen
class Seam:
    """A Keras name that is replaced while shardcore is installed.

    Args:
        module: The module that defines it.
        name: The name in the module, dotted for a member of a class.
        reason: Why it is replaced.
        everywhere: Whether modules that imported the name for themselves get the new value too.
    """

    module: str
    name: str
    reason: str
    everywhere: bool = False


# What a user calls on a trainer.
RUNS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

SEAMS = {
    "backend library": Seam(
        "keras.src.backend", "distribution_lib", "None on torch: keras.distribution calls it."
    ),
    "distribution library": Seam(
        "keras.src.distribution.distribution_lib",
        "distribution_lib",
        "Keeps its own reference to the backend library.",
    ),
    "distribution attribute": Seam(
        "keras.src.backend.common.global_state",
        "set_global_attribute",
        "set_distribution() and scope() end here, under whatever name they were imported: plain "
        "tensors mix with sharded ones from here on; the mesh is made here.",
    ),
    "clear_session": Seam(
        "keras.src.backend.common.global_state",
        "clear_session",
        "It drops the distribution without a word.",
        everywhere=True,
    ),
    "layout axes": Seam(
        "keras.src.distribution.distribution_lib",
        "TensorLayout._validate_axes",
        "Refuses several axes on one dim; an axis used twice passes.",
    ),
    "layout map lookup": Seam(
        "keras.src.distribution.distribution_lib",
        "LayoutMap.__getitem__",
        "Rules are matched by the path matcher, the same for Keras and PyTorch names.",
    ),
    "layout map rule": Seam(
        "keras.src.distribution.distribution_lib",
        "LayoutMap.__setitem__",
        "A rule that cannot be read is an error where it is written.",
    ),
    "variable initialize": Seam(
        "keras.src.backend.torch.core",
        "Variable._initialize",
        "The torch variable ignores its layout.",
    ),
    "variable assign": Seam(
        "keras.src.backend.torch.core",
        "Variable._direct_assign",
        "A value is brought into the variable's layout.",
    ),
    "variable repr": Seam(
        "keras.src.backend.common.variables",
        "Variable.__repr__",
        "Prints the value: a collective, where one rank prints.",
    ),
    "convert_to_numpy": Seam(
        "keras.src.backend.torch.core",
        "convert_to_numpy",
        "NumPy gets the whole value.",
        everywhere=True,
    ),
    "layer call": Seam(
        "keras.src.layers.layer",
        "Layer.__call__",
        "Plain tensors mix with sharded ones in it on threads that have no distribution.",
    ),
    "layer edges": Seam(
        "keras.src.layers.layer",
        "distribution_lib",
        "Layer.__call__ relays a layer's output through it.",
    ),
    "torch module parameters": Seam(
        "keras.src.utils.torch_utils",
        "TorchModuleWrapper._track_module_parameters",
        "The module and Keras hold the same parameters: both get the sharded ones.",
    ),
    "torch module config": Seam(
        "keras.src.utils.torch_utils",
        "TorchModuleWrapper.get_config",
        "Pickles the module, which holds shards.",
    ),
    "packed kernel": Seam(
        "keras.src.layers.core.einsum_dense",
        "EinsumDense._int4_build",
        "Its int4 kernel has other dims than the kernel that a rule was written for.",
    ),
    "data adapters": Seam(
        "keras.src.trainers.data_adapters",
        "distribution_lib",
        "Refuses everything but tf.data in several processes; shardcore takes the rows itself.",
    ),
    "array batches": Seam(
        "keras.src.trainers.data_adapters.array_data_adapter",
        "ArrayDataAdapter.get_torch_dataloader",
        "Reads every row of a batch; a rank needs its own.",
    ),
    **{
        f"scope of {name}": Seam(
            "keras.src.backend.torch.trainer",
            f"TorchTrainer.{name}",
            "Of a sharded model outside its scope, data, callbacks and files find no distribution.",
        )
        for name in RUNS
    },
    "beginning of an epoch": Seam(
        "keras.src.trainers.epoch_iterator",
        "EpochIterator.__iter__",
        "Ranks whose generators or copies of variables have come apart are found there.",
    ),
    "epoch": Seam(
        "keras.src.backend.torch.trainer",
        "TorchEpochIterator._get_iterator",
        "Ranks that would make another number of steps are found before the first.",
    ),
    "train step": Seam(
        "keras.src.backend.torch.trainer",
        "TorchTrainer.make_train_function",
        "A batch is split before the step, and logs are whole after it.",
    ),
    "test step": Seam(
        "keras.src.backend.torch.trainer", "TorchTrainer.make_test_function", "As the train step."
    ),
    "predict step": Seam(
        "keras.src.backend.torch.trainer",
        "TorchTrainer.make_predict_function",
        "As the train step.",
    ),
    "automatic compilation": Seam(
        "keras.src.trainers.trainer",
        "Trainer._resolve_auto_jit_compile",
        'On torch jit_compile="auto" becomes False, which a user may ask for too: it stays told.',
    ),
    "random generator": Seam(
        "keras.src.backend.torch.random",
        "torch_seed_generator",
        "Reads the seed on the host, where a recording of the step does not see it.",
        everywhere=True,
    ),
    **{
        f"draws of {name}": Seam(
            "keras.src.backend.torch.random",
            name,
            "Sets torch's own generator by a number, where a recording does not see it.",
        )
        for name in ("beta", "binomial", "gamma")
    },
    "numbers of Nadam": Seam(
        torch_nadam.__name__,  # imported above: Keras does not before the first Nadam is made
        "core",
        "Reads a product of its state on the host at each step, where a recording does not see it.",
    ),
    "metric results": Seam(
        "keras.src.trainers.trainer",
        "Trainer.get_metrics_result",
        "The states of all metrics are reduced together, before the first is read.",
    ),
    "results of an epoch": Seam(
        "keras.src.trainers.trainer",
        "Trainer._get_metrics_result_or_logs",
        "Steps whose results nobody reads have not worked them out.",
    ),
    **{
        f"callbacks of {phase} steps": Seam(
            "keras.src.callbacks.callback_list",
            f"CallbackList.on_{phase}_begin",
            "Nobody else knows the callbacks, which may read the results of each step.",
        )
        for phase in ("train", "test")
    },
    "compilation": Seam(
        "keras.src.backend.torch.trainer",
        "TorchTrainer._should_torch_compile",
        "torch.compile dies on Keras' own Python over sharded tensors: recordings are compiled.",
    ),
    "initial states": Seam(
        "keras.src.layers.rnn.rnn",
        "RNN.get_initial_state",
        "Whole on every rank, beside sequences whose rows are split.",
    ),
    "mask of a loss": Seam(
        "keras.src.losses.loss",
        "apply_mask",
        "Multiplies sample weights in place, which an array on one device does not see.",
    ),
    "export": Seam(
        "keras.src.models.model",
        "Model.export",
        "One rank exports, from whole values; the others bring their shards.",
    ),
    "save model": Seam(
        "keras.src.saving.saving_lib",
        "save_model",
        "Every rank would write the file; one does, the others bring their shards.",
    ),
    "save weights": Seam(
        "keras.src.saving.saving_lib", "save_weights_only", "As for the whole model."
    ),
    "overwrite question": Seam(
        "keras.src.utils.io_utils",
        "ask_to_proceed_with_overwrite",
        "One rank asks, all do what is answered.",
    ),
    **{
        f"files of {module}": Seam(
            f"keras.src.callbacks.{module}",
            "file_utils",
            "Every rank would write the callback's files; one does.",
        )
        for module in ("backup_and_restore", "csv_logger", "model_checkpoint", "tensorboard")
    },
    "summaries": Seam(
        "keras.src.callbacks.tensorboard",
        "TensorBoard.summary",
        "Every rank would write into one folder; one does.",
    ),
    "remote monitor": Seam(
        "keras.src.callbacks.remote_monitor",
        "RemoteMonitor.on_epoch_end",
        "Every rank would send; one does.",
    ),
    "orbax": Seam(
        "keras.src.callbacks.orbax_checkpoint",
        "OrbaxCheckpoint.set_model",
        "On torch every rank would write the same folder.",
    ),
    "messages": Seam("keras.src.utils.io_utils", "print_msg", "One rank prints.", everywhere=True),
    "progress bar": Seam(
        "keras.src.callbacks.progbar_logger",
        "ProgbarLogger.set_params",
        "One rank shows progress.",
    ),
}


class Auto(str):
    """What `jit_compile="auto"` becomes: false to Keras, which else calls torch.compile.

    It is written into files as "auto", and so read again.
    """

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


AUTO = Auto("auto")


@attrs.define
class Rebinding:
    """Names that have been replaced, and what they were."""

    _undo: list[Callable[[], None]] = attrs.field(factory=list, init=False)

    def replace(self, seam: Seam, make: Callable[[Any], Any]) -> None:
        """Give `seam` the value `make(original)`."""
        holder, name = _holder(seam)
        original = vars(holder)[name]
        value = make(original)
        for place in _importers(original) if seam.everywhere else [holder]:
            self._set(place, name, value, vars(place)[name])

    def _set(self, holder: Any, name: str, value: Any, original: Any) -> None:
        setattr(holder, name, value)
        self._undo.append(lambda: setattr(holder, name, original))

    def restore(self) -> None:
        """Put every name back, the last one first."""
        while self._undo:
            self._undo.pop()()


def _holder(seam: Seam) -> tuple[Any, str]:
    """The module or class that holds the name, and the name in it."""
    holder: Any = importlib.import_module(seam.module)
    *classes, name = seam.name.split(".")
    for each in classes:
        holder = getattr(holder, each)
    return holder, name


def _importers(original: Any) -> list[ModuleType]:
    """The loaded Keras modules that hold `original` under its own name."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]
    return [m for m in modules if vars(m).get(original.__name__) is original]


def current_distribution() -> Any:
    """The distribution that is set on this thread, or None."""
    return global_state.get_global_attribute(CURRENT_DISTRIBUTION)


def forget_distribution() -> None:
    """Unset the distribution of this thread."""
    global_state.set_global_attribute(CURRENT_DISTRIBUTION, None)


def user_seed() -> int | None:
    """The seed of `keras.utils.set_random_seed`, None if it was not called."""
    seed: int | None = rng_utils.get_random_seed()
    return seed


def is_symbolic() -> bool:
    """Whether Keras is working out shapes, on the meta device."""
    return str(torch_core.get_device()) == "meta"


def layer_path() -> str:
    """The path of the layer that is being called."""
    path: str = current_path()
    return path


def is_made_by_optimizer() -> bool:
    """Whether the variable that is being made belongs to an optimizer: its scope tells who asks."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, optimizers.Optimizer)


def global_seed() -> Any:
    """The state of the generator that random layers without a seed draw from; None before one."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def draw_seed(seed: Any) -> tuple[Any, Any]:
    """Both halves of the next seed of `seed`, as tensors."""
    first, second = seed_generator.draw_seed(seed)
    return first, second


def is_own_step(trainer: Any, name: str) -> bool:
    """Whether the user has written the method `name`, such as `train_step`, of `trainer`."""
    return getattr(type(trainer), name) is not getattr(torch_trainer.TorchTrainer, name)


def gives_own_logs(trainer: Any, step: str) -> bool:
    """Whether what a step of `trainer` returns is more, or less, than the results of its metrics.

    Args:
        trainer: The model.
        step: "train_step" or "test_step".
    """
    names = (step, "compute_metrics", "get_metrics_result", "_get_metrics_result_or_logs")
    return any(name in vars(trainer) or is_own_step(trainer, name) for name in names)


def read_steps(callbacks: CallbackList, phase: str) -> bool:
    """Whether one of `callbacks` does something between two steps of a fit, or of an evaluate."""
    if type(callbacks) is not CallbackList:
        return True
    hooks = [f"on_{phase}_batch_{when}" for when in ("begin", "end")]
    hooks += ["on_batch_begin", "on_batch_end"] if phase == "train" else []
    return any(
        any(not is_default(getattr(each, hook)) for hook in hooks) and not _rests(each, phase)
        for each in callbacks.callbacks
    )


def _rests(callback: Callback, phase: str) -> bool:
    """Whether a callback of Keras is one that has such a hook, and does nothing in it."""
    if type(callback) is ProgbarLogger:
        return bool(callback.verbose != 1 or (phase == "test" and callback._called_in_fit))
    if type(callback) in (ModelCheckpoint, BackupAndRestore):
        return bool(callback.save_freq == "epoch")
    return False


def parts_of(trainer: Any) -> list[Any]:
    """The layers of a model, its optimizer, metrics and losses: what its steps call."""
    found = [
        *trainer._flatten_layers(),
        getattr(trainer, "optimizer", None),
        getattr(trainer, "_compile_loss", None),
        *(trainer.metrics if getattr(trainer, "compiled", False) else []),
    ]
    return list({id(each): each for each in found if each is not None}.values())


def modules_of(trainer: Any) -> list[tuple[str, Any]]:
    """The torch modules of a model, its layers among them, which do not all know each other."""
    found: dict[int, tuple[str, Any]] = {}
    for layer in trainer._flatten_layers():
        for name, module in layer.named_modules():
            found.setdefault(id(module), (f"{layer.name}.{name}".rstrip("."), module))
    return list(found.values())


def hook_of(trainer: Any) -> str:
    """The first module of a model that has a hook of the user's, empty if there is none."""
    for name, module in modules_of(trainer):
        kept = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in (each for hooks in kept for each in hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith("shardcore."):
                return f"module {name!r}"
    return ""


def is_layer(value: Any) -> bool:
    """Whether `value` is a Keras layer, or keeps parameters for one."""
    return isinstance(value, Layer | torch.nn.ParameterDict | torch.nn.ParameterList)


def is_variable(value: Any) -> bool:
    """Whether `value` is a Keras variable."""
    return isinstance(value, backend.Variable)


# What a trainer notes of its runs, and no step looks at.
RUNS_NOTED = {
    "_eval_epoch_iterator",
    "_initial_epoch",
    "history",
    "predict_function",
    "stop_evaluating",
    "stop_predicting",
    "stop_training",
    "test_function",
    "train_function",
}


def is_bookkeeping(value: Any) -> bool:
    """Whether `value` tells how a model was made or is trained, which no step looks at."""
    of_keras = backend.KerasTensor | Node | Callback | CallbackList | EpochIterator | DataAdapter
    return isinstance(value, of_keras | torch.nn.ParameterDict | torch.nn.ParameterList)


def is_seed(variable: Any) -> bool:
    """Whether the variable is the state of a `keras.random.SeedGenerator`, by the name it gets."""
    return bool(variable.name == "seed_generator_state")


def map_tensors(function: Callable[[Any], Any], structure: Any) -> Any:
    """`structure` with `function` applied to its tensors; the rest stays."""
    return tree.map_structure(
        lambda leaf: function(leaf) if backend.is_tensor(leaf) else leaf, structure
    )


class _NoFile(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store that brings each value to the rank that writes, and keeps none."""

    def __init__(self) -> None:
        self.archive = None

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_NoFile":
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        backend.convert_to_numpy(value)

    def close(self) -> None:
        pass


def gather_model(model: Any) -> None:
    """Visit the config and the state of `model` as saving does, and write nothing."""
    saving_lib._serialize_model_as_json(model)
    gather_state(model)


def gather_state(model: Any, objects_to_skip: Any = None) -> None:
    """Visit the state of `model` as saving does, in the same order, and write nothing."""
    with closing(saving_lib.DiskIOStore("assets", mode="w")) as scratch:
        saving_lib._save_state(
            model,
            weights_store=_NoFile(),
            assets_store=scratch,
            inner_path="",
            visited_saveables={id(each) for each in objects_to_skip or ()},
        )


def can_send() -> bool:
    """Whether `requests`, which `RemoteMonitor` needs, is installed."""
    return remote_monitor.requests is not None


def print_message(message: str) -> None:
    """Print as Keras does, to standard output or to where its logging is set to go."""
    io_utils.print_msg(message)


def is_remote(path: str) -> bool:
    """Whether Keras writes `path` by a remote file system."""
    return bool(file_utils.is_remote_path(path)) or path.startswith("hf://")


def copy_mask(source: Any, target: Any) -> None:
    """Give `target` the Keras mask of `source`, if it has one."""
    mask = backend.get_keras_mask(source)
    if mask is not None:
        backend.set_keras_mask(target, mask)


def leaves(structure: Any) -> list[Any]:
    """The leaves of `structure`, None among them."""
    found: list[Any] = tree.flatten(structure)
    return found


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """`structure` with `function` applied to every leaf but None."""
    return tree.map_structure(function, structure, none_is_leaf=False)


def arrays_of(adapter: Any) -> Any:
    """The arrays that a data adapter cuts its batches from, nested; None if it has none."""
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights of a batch as `fit` takes it."""
    parts: tuple[Any, Any, Any] = data_adapter_utils.unpack_x_y_sample_weight(batch)
    return parts


def torch_device() -> Any:
    """The device on which Keras makes tensors."""
    return torch_core.get_device()


@contextmanager
def unnoticed() -> Iterator[None]:
    """What is built inside leaves no trace: Keras counts names and draws seeds as if it were not.

    No distribution may be set.
    """
    before = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    names = copy(before.get("object_name_uids"))
    drawn = random.getstate(), numpy.random.get_state()
    global_state.set_global_attribute("object_name_uids", names)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        now = vars(global_state.GLOBAL_STATE_TRACKER)  # another one after a clear_session()
        now.clear()
        now.update(before)
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
