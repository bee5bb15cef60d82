"""All Keras names that shardcore replaces, each with its reason and the lines that have it (ADR 2).

One table, longer than other files, since each entry is read by itself.
"""

import attrs
from keras.src.backend.torch.optimizers import torch_nadam

from shardcore.binding.keras_private.lines import LINE, here
from shardcore.binding.keras_private.models import ADAM


@attrs.frozen
class Patch:
    """A Keras name that is replaced while shardcore is installed.

    Args:
        name: The module that defines it, a colon, and the name in it, dotted for a class member, as
            in Keras 3.15.
        reason: Why it is replaced.
        everywhere: Whether modules that have imported the name get the new value too.
        since: The first line of Keras in which it is replaced.
        until: The last one.
    """

    name: str
    reason: str
    everywhere: bool = False
    since: tuple[int, ...] = (3, 13)
    until: tuple[int, ...] = LINE

    @property
    def key(self) -> str:
        """The class and its member, or the last module and the name in it."""
        module, _, name = self.name.partition(":")
        return name if name[0].isupper() else f"{module.rpartition('.')[2]}.{name}"

    @property
    def place(self) -> str:
        """The name in the Keras that is installed."""
        return here(self.name)


# The steps of a trainer, and the methods that a user calls.
STEPS = ("train", "test", "predict")
RUNS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# The steps that callbacks see.
PHASES = ("train", "test", "predict")
# The functions that set torch's generator.
DRAWS = ("beta", "binomial", "gamma")
# Those that draw the initial values of variables.
INITIAL_DRAWS = ("normal", "truncated_normal", "uniform")
# The functions that quantize a kernel, and the first line that has each.
QUANTIZERS = {
    "abs_max_quantize": (3, 13),
    "abs_max_quantize_grouped_with_zero_point": (3, 14),
}
# The modules of data adapters that read the distribution.
ADAPTERS = ("array_data_adapter", "py_dataset_adapter", "torch_data_loader_adapter")
# The modules of the callbacks that write files.
CALLBACKS_WITH_FILES = ("backup_and_restore", "csv_logger", "model_checkpoint", "tensorboard")

# The methods of callbacks that write a file.
WRITERS = {
    "backup_and_restore": ("BackupAndRestore.on_train_end",),
    "csv_logger": ("CSVLogger.on_train_begin", "CSVLogger.on_epoch_end"),
    "model_checkpoint": ("ModelCheckpoint._save_model",),
    "tensorboard": tuple(
        f"TensorBoard.{method}"
        for method in (
            *("set_model", "on_train_begin", "on_train_end"),
            *("on_test_begin", "on_test_end", "on_epoch_end"),
        )
    ),
}
# Those that may write at each step.
STEP_WRITERS = {
    "tensorboard": ("TensorBoard.on_train_batch_begin", "TensorBoard.on_train_batch_end"),
}

ALL = (
    Patch("keras.src.backend:distribution_lib", "None on torch: keras.distribution calls it."),
    Patch(
        "keras.src.distribution.distribution_lib:distribution_lib",
        "Keeps its own reference to the backend library.",
    ),
    Patch(
        "keras.src.backend.common.global_state:set_global_attribute",
        "set_distribution() and scope() end here, under whatever name they were imported: plain "
        "tensors mix with sharded ones from here on; the mesh is made here.",
    ),
    Patch(
        "keras.src.backend.common.global_state:clear_session",
        "Drops the distribution silently.",
        everywhere=True,
    ),
    Patch(
        "keras.src.distribution.distribution_lib:TensorLayout._validate_axes",
        "Refuses several axes on one dim; an axis used twice passes.",
    ),
    Patch(
        "keras.src.distribution.distribution_lib:LayoutMap.__getitem__",
        "`domain.paths` matches rules, the same for Keras and PyTorch names.",
    ),
    Patch(
        "keras.src.distribution.distribution_lib:LayoutMap.__setitem__",
        "A malformed rule raises at once.",
    ),
    Patch(
        "keras.src.distribution.distribution_lib:ModelParallel.num_model_replicas",
        "Knows one axis of the batch.",
        since=(3, 15),
    ),
    Patch(
        "keras.src.distribution.distribution_lib:ModelParallel.__init__",
        "Looks up one axis of the batch.",
        since=(3, 14),
        until=(3, 14),
    ),
    Patch(
        "keras.src.backend.common.variables:Variable.__init__",
        "Drops the layout that an optimizer gives its variables.",
        until=(3, 14),
    ),
    Patch(
        "keras.src.backend.torch.core:Variable._initialize",
        "The torch variable ignores its layout.",
    ),
    Patch(
        "keras.src.backend.common.variables:Variable._initialize_with_initializer",
        "Draws the full value; a rank keeps its shard.",
    ),
    *(
        Patch(
            f"keras.src.backend.torch.random:{name}",
            "Makes several copies of the full value of a variable.",
        )
        for name in INITIAL_DRAWS
    ),
    Patch(
        "keras.src.backend.common.variables:AutocastScope.maybe_cast",
        "Infers shapes with variables in the wrong dtype. If that fails, each rank runs the model "
        "on the global batch.",
    ),
    Patch(
        "keras.src.backend.torch.core:Variable._convert_to_tensor",
        "Copies an array that is copied into the variable.",
    ),
    Patch(
        "keras.src.backend.torch.core:Variable._direct_assign",
        "The value is redistributed to the variable's layout.",
    ),
    Patch(
        "keras.src.backend.torch.core:Variable._initialize_distributed",
        "Lays out the variable as a DTensor of Keras.",
        since=(3, 16),
    ),
    Patch(
        "keras.src.backend.torch.core:Variable.__repr__",
        "Prints the value: a collective, though one rank prints.",
    ),
    Patch(
        "keras.src.backend.torch.core:convert_to_numpy",
        "NumPy gets the full value.",
        everywhere=True,
    ),
    Patch(
        "keras.src.layers.layer:Layer.__call__",
        "Plain tensors mix with sharded ones in it on threads that have no distribution.",
    ),
    Patch(
        "keras.src.layers.layer:distribution_lib",
        "Layer.__call__ lays out the output of a layer by it.",
    ),
    Patch(
        "keras.src.utils.torch_utils:TorchModuleWrapper._track_module_parameters",
        "The module and Keras hold the same parameters: both get the sharded ones.",
    ),
    Patch(
        "keras.src.utils.torch_utils:TorchModuleWrapper.get_config",
        "Pickles the module, which holds shards.",
    ),
    *(
        Patch(
            f"keras.src.quantizers.quantizers:{name}",
            "Makes several full copies of a sharded kernel.",
            everywhere=True,
            since=since,
        )
        for name, since in QUANTIZERS.items()
    ),
    Patch(
        "keras.src.layers.core.einsum_dense:EinsumDense.quantized_build",
        "Its int4 kernel has other dims than the kernel that a rule was written for.",
    ),
    Patch(
        "keras.src.trainers.data_adapters:distribution_lib",
        "Refuses everything but tf.data in several processes; shardcore takes the rows itself.",
    ),
    *(
        Patch(
            f"keras.src.trainers.data_adapters.{module}:distribution_lib",
            "Gives each process other batches; shardcore shards every batch.",
            since=(3, 16),
        )
        for module in ADAPTERS
    ),
    Patch(
        "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.get_torch_dataloader",
        "Reads every row of a batch; a rank needs its own.",
    ),
    *(
        Patch(
            f"keras.src.backend.torch.trainer:TorchTrainer.{name}",
            "Of a sharded model outside its scope, data, callbacks and files find no distribution.",
        )
        for name in RUNS
    ),
    Patch(
        "keras.src.trainers.epoch_iterator:EpochIterator.__iter__",
        "Generators and replicated variables are compared there, and a resumed fit goes on.",
    ),
    Patch(
        "keras.src.backend.torch.trainer:TorchEpochIterator._get_iterator",
        "Ranks with other numbers of steps are found there; batches are counted to resume.",
    ),
    *(
        Patch(
            f"keras.src.backend.torch.trainer:TorchTrainer.make_{kind}_function",
            "A batch is sharded before the step, and its logs are all-gathered after it.",
        )
        for kind in STEPS
    ),
    Patch(
        "keras.src.trainers.trainer:Trainer._resolve_auto_jit_compile",
        'On torch jit_compile="auto" becomes False, which a user may ask for too: both stay known.',
    ),
    Patch(
        "keras.src.backend.torch.random:torch_seed_generator",
        "Reads the seed on the host, where a trace of the step does not see it.",
        everywhere=True,
    ),
    *(
        Patch(
            f"keras.src.backend.torch.random:{name}",
            "Sets torch's own generator by a number, where a trace does not see it.",
        )
        for name in DRAWS
    ),
    Patch(
        "keras.src.backend.torch.core:remat",
        "Sets torch's own generators to recompute a layer, where a trace does not see it.",
    ),
    Patch(
        f"{ADAM}:Adam._parallel_update_step",
        "Runs ten operators over all variables: torch has one.",
    ),
    Patch(
        # Imported above, since Keras imports it only with the first Nadam.
        f"{torch_nadam.__name__}:core",
        "Reads a product of its state on the host at each step, where a trace does not see it.",
    ),
    Patch(
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._common_apply",
        "Reads on the host whether all gradients are finite.",
    ),
    Patch(
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite",
        "Makes four tensors of the size of each gradient.",
    ),
    Patch(
        "keras.src.backend.torch.core:cond",
        "Reads its predicate on the host, in the update of a LossScaleOptimizer too.",
        everywhere=True,
    ),
    Patch(
        "keras.src.backend.torch.core:scatter",
        "Adds value by value, each at an index that is read on the host.",
    ),
    Patch(
        "keras.src.backend.torch.math:segment_sum",
        "Writes each element by its index in the full tensor.",
    ),
    Patch(
        "keras.src.backend.torch.numpy:repeat",
        "Looks up each element by its index, which moves the heads of grouped attention.",
        until=(3, 14),
    ),
    Patch(
        "keras.src.backend.torch.numpy:einsum",
        "Makes one matrix of the kernels of all experts, which would be all-gathered.",
    ),
    Patch(
        "keras.src.backend.torch.core:slice",
        "Reads where a slice begins on the host: a trace would have one place only.",
    ),
    Patch(
        "keras.src.backend.torch.core:slice_update",
        "Writes element by element, by indices of the full tensor.",
    ),
    Patch(
        "keras.src.backend.torch.core:while_loop",
        "Every token of generate() runs eagerly: an iteration is a captured step.",
    ),
    Patch(
        "keras.src.backend.torch.nn:_transpose_spatial_inputs",
        "Copies images to have their channels first, before each convolution and pooling.",
    ),
    Patch(
        "keras.src.backend.torch.nn:sparse_categorical_crossentropy",
        "Moves the classes of sequences to dim 1: all logits are copied, and their gradient.",
    ),
    Patch(
        "keras.src.optimizers.base_optimizer:BaseOptimizer.apply",
        "Ranks with different inputs would train different weights in a loop outside fit.",
    ),
    Patch(
        "keras.src.losses.loss:Loss.__call__",
        "In a loop outside fit the targets may be the rows of one rank.",
    ),
    Patch(
        "keras.src.backend.torch.nn:DTensor",
        "Attention computes on the local shards of a DTensor, and makes a plain DTensor of them.",
        since=(3, 16),
    ),
    Patch(
        "keras.src.backend.torch.trainer:distribution",
        "Lays out batches, outputs and metrics as DTensors of Keras.",
        since=(3, 16),
    ),
    Patch(
        "keras.src.backend.torch.trainer:TorchTrainer._initialize_ddp",
        "Wraps the model in DDP if there is a process group.",
        since=(3, 16),
    ),
    Patch(
        "keras.src.backend.torch.trainer:TorchTrainer.get_metrics_result",
        "The states of all metrics are reduced together, before the first is read.",
    ),
    Patch(
        "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs",
        "Steps whose results no callback reads have not computed them.",
    ),
    *(
        Patch(
            f"keras.src.callbacks.callback_list:CallbackList.on_{phase}_begin",
            "Only this list has the callbacks, which may read the results of each step.",
        )
        for phase in PHASES
    ),
    *(
        Patch(
            f"keras.src.callbacks.callback_list:CallbackList.on_{hook}_end",
            "After it all ranks may end together, on SIGTERM.",
        )
        for hook in ("train_batch", "epoch", "train")
    ),
    Patch(
        "keras.src.backend.torch.trainer:TorchTrainer._should_torch_compile",
        "torch.compile dies on Keras' own Python over sharded tensors: traces are compiled.",
    ),
    Patch(
        "keras.src.models.functional:Functional._standardize_inputs",
        "An input is no call of a layer, so that a rule for its output would not be read.",
    ),
    Patch(
        "keras.src.layers.rnn.rnn:RNN.get_initial_state",
        "Replicated, while the rows of the sequences are sharded.",
    ),
    Patch(
        "keras.src.losses.loss:apply_mask",
        "Multiplies sample weights in place, which an array on one device does not see.",
    ),
    Patch(
        "keras.src.models.model:Model.export",
        "One rank exports full values; all ranks all-gather the shards.",
    ),
    Patch(
        "keras.src.saving.saving_lib:save_model",
        "Every rank would write the file; one does, all ranks all-gather the shards.",
    ),
    Patch("keras.src.saving.saving_lib:save_weights_only", "As for the whole model."),
    Patch(
        "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5",
        'As for the whole model: save("model.h5") opened one file on every rank.',
    ),
    Patch(
        "keras.src.saving.saving_lib:H5IOStore.__init__",
        "Every rank would write the file of LoRA weights; one does.",
    ),
    Patch("keras.src.saving.saving_lib:H5IOStore.close", "One rank writes what it holds."),
    Patch(
        "keras.src.saving.saving_lib:is_memory_sufficient",
        "Reads and writes a whole archive in memory.",
    ),
    Patch(
        "keras.src.saving.saving_lib:zipfile",
        "Reads an archive from its beginning at each step back, or extracts it on each rank.",
    ),
    Patch(
        "keras.src.utils.io_utils:ask_to_proceed_with_overwrite",
        "One rank asks, and all use its answer.",
    ),
    *(
        Patch(
            f"keras.src.callbacks.{module}:file_utils",
            "Every rank would write the callback's files; one does.",
        )
        for module in CALLBACKS_WITH_FILES
    ),
    *(
        Patch(
            f"keras.src.callbacks.{module}:{method}",
            "A full disk would be an error on one rank.",
        )
        for module, methods in (*WRITERS.items(), *STEP_WRITERS.items())
        for method in methods
    ),
    Patch(
        "keras.src.callbacks.backup_and_restore:BackupAndRestore._save_model",
        "Saves the epoch in a second file, and no state of generators.",
    ),
    Patch(
        "keras.src.callbacks.backup_and_restore:BackupAndRestore._load_model",
        "Reads the epoch from a second file, and no state of generators.",
    ),
    Patch(
        "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_epoch_end",
        "Of a save after the last step the epoch would be resumed with no step left.",
    ),
    Patch(
        "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_begin",
        "Copies the backup before a damaged one on every rank; one does.",
    ),
    Patch(
        "keras.src.callbacks.tensorboard:TensorBoard.summary",
        "Every rank would write into one folder; one does.",
    ),
    Patch(
        "keras.src.callbacks.remote_monitor:RemoteMonitor.on_epoch_end",
        "Every rank would send; one does.",
    ),
    Patch(
        "keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint.set_model",
        "On torch every rank would write the same folder.",
    ),
    Patch("keras.src.utils.io_utils:print_msg", "One rank prints.", everywhere=True),
    Patch("keras.src.utils.summary_utils:print_summary", "One rank prints.", everywhere=True),
    Patch(
        "keras.src.callbacks.progbar_logger:ProgbarLogger.set_params", "One rank shows progress."
    ),
)
assert len({patch.key for patch in ALL}) == len(ALL), "two patches have one key"
# The patches of the installed release of Keras, by their keys.
PATCHES = {patch.key: patch for patch in ALL if patch.since <= LINE <= patch.until}
# Replaced only in the contexts of `shapes`, in which tensors have no values.
WITHOUT_VALUES = {
    patch.key: patch
    for patch in (
        Patch(
            "keras.src.backend.torch.numpy:repeat",
            "Gives itself a symbolic tensor on the meta device, which it cannot convert.",
            everywhere=True,
        ),
        Patch(
            "keras.src.backend.torch.random:torch_seed_generator",
            "Reads the values of a seed.",
            everywhere=True,
        ),
        Patch(
            "keras.src.backend.common.variables:Variable._initialize_with_initializer",
            "Makes a value, for which memory may be too small.",
        ),
        Patch(
            "keras.src.backend.torch.core:Variable._direct_assign",
            "Writes into a value that is not there.",
        ),
        Patch(
            "keras.src.backend.torch.core:convert_to_numpy",
            "Reads a value that is not there.",
            everywhere=True,
        ),
    )
}
