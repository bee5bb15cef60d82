"""All Keras names that shardcore replaces, each with its reason, for Keras 3.15 on torch."""

import attrs
from keras.src.backend.torch.optimizers import torch_nadam

from shardcore.binding.seams.models import ADAM


@attrs.frozen
class Seam:
    """A Keras name that is replaced while shardcore is installed.

    Args:
        name: The module that defines it, a colon, and the name in it, dotted for a class member.
        reason: Why it is replaced.
        everywhere: Whether modules that have imported the name get the new value too.
    """

    name: str
    reason: str
    everywhere: bool = False


# The steps of a trainer, and the methods that a user calls.
STEPS = ("train", "test", "predict")
RUNS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# The steps that callbacks see.
PHASES = ("train", "test")
# The functions that set torch's generator.
DRAWS = ("beta", "binomial", "gamma")
# The modules of the callbacks that write files.
CALLBACKS_WITH_FILES = ("backup_and_restore", "csv_logger", "model_checkpoint", "tensorboard")

SEAMS = {
    "backend library": Seam(
        "keras.src.backend:distribution_lib", "None on torch: keras.distribution calls it."
    ),
    "distribution library": Seam(
        "keras.src.distribution.distribution_lib:distribution_lib",
        "Keeps its own reference to the backend library.",
    ),
    "distribution attribute": Seam(
        "keras.src.backend.common.global_state:set_global_attribute",
        "set_distribution() and scope() end here, under whatever name they were imported: plain "
        "tensors mix with sharded ones from here on; the mesh is made here.",
    ),
    "clear_session": Seam(
        "keras.src.backend.common.global_state:clear_session",
        "Drops the distribution silently.",
        everywhere=True,
    ),
    "layout axes": Seam(
        "keras.src.distribution.distribution_lib:TensorLayout._validate_axes",
        "Refuses several axes on one dim; an axis used twice passes.",
    ),
    "layout map lookup": Seam(
        "keras.src.distribution.distribution_lib:LayoutMap.__getitem__",
        "`domain.paths` matches rules, the same for Keras and PyTorch names.",
    ),
    "layout map rule": Seam(
        "keras.src.distribution.distribution_lib:LayoutMap.__setitem__",
        "A malformed rule raises at once.",
    ),
    "variable initialize": Seam(
        "keras.src.backend.torch.core:Variable._initialize",
        "The torch variable ignores its layout.",
    ),
    "variable assign": Seam(
        "keras.src.backend.torch.core:Variable._direct_assign",
        "The value is redistributed to the variable's layout.",
    ),
    "variable repr": Seam(
        "keras.src.backend.common.variables:Variable.__repr__",
        "Prints the value: a collective, though one rank prints.",
    ),
    "convert_to_numpy": Seam(
        "keras.src.backend.torch.core:convert_to_numpy",
        "NumPy gets the whole value.",
        everywhere=True,
    ),
    "layer call": Seam(
        "keras.src.layers.layer:Layer.__call__",
        "Plain tensors mix with sharded ones in it on threads that have no distribution.",
    ),
    "layer edges": Seam(
        "keras.src.layers.layer:distribution_lib",
        "Layer.__call__ lays out the output of a layer by it.",
    ),
    "torch module parameters": Seam(
        "keras.src.utils.torch_utils:TorchModuleWrapper._track_module_parameters",
        "The module and Keras hold the same parameters: both get the sharded ones.",
    ),
    "torch module config": Seam(
        "keras.src.utils.torch_utils:TorchModuleWrapper.get_config",
        "Pickles the module, which holds shards.",
    ),
    "packed kernel": Seam(
        "keras.src.layers.core.einsum_dense:EinsumDense._int4_build",
        "Its int4 kernel has other dims than the kernel that a rule was written for.",
    ),
    "data adapters": Seam(
        "keras.src.trainers.data_adapters:distribution_lib",
        "Refuses everything but tf.data in several processes; shardcore takes the rows itself.",
    ),
    "array batches": Seam(
        "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.get_torch_dataloader",
        "Reads every row of a batch; a rank needs its own.",
    ),
    **{
        f"scope of {name}": Seam(
            f"keras.src.backend.torch.trainer:TorchTrainer.{name}",
            "Of a sharded model outside its scope, data, callbacks and files find no distribution.",
        )
        for name in RUNS
    },
    "beginning of an epoch": Seam(
        "keras.src.trainers.epoch_iterator:EpochIterator.__iter__",
        "Generators and replicated variables are compared between ranks there.",
    ),
    "epoch": Seam(
        "keras.src.backend.torch.trainer:TorchEpochIterator._get_iterator",
        "Ranks with other numbers of steps are found before the first step.",
    ),
    **{
        f"{kind} step": Seam(
            f"keras.src.backend.torch.trainer:TorchTrainer.make_{kind}_function",
            "A batch is split before the step, and its logs are gathered after it.",
        )
        for kind in STEPS
    },
    "automatic compilation": Seam(
        "keras.src.trainers.trainer:Trainer._resolve_auto_jit_compile",
        'On torch jit_compile="auto" becomes False, which a user may ask for too: both stay known.',
    ),
    "random generator": Seam(
        "keras.src.backend.torch.random:torch_seed_generator",
        "Reads the seed on the host, where a recording of the step does not see it.",
        everywhere=True,
    ),
    **{
        f"draws of {name}": Seam(
            f"keras.src.backend.torch.random:{name}",
            "Sets torch's own generator by a number, where a recording does not see it.",
        )
        for name in DRAWS
    },
    "update of Adam": Seam(
        f"{ADAM}:Adam._parallel_update_step",
        "Runs ten operators over all variables: torch has one.",
    ),
    "numbers of Nadam": Seam(
        # Imported above, since Keras imports it only with the first Nadam.
        f"{torch_nadam.__name__}:core",
        "Reads a product of its state on the host at each step, where a recording does not see it.",
    ),
    "scatter": Seam(
        "keras.src.backend.torch.core:scatter",
        "Adds value by value, each at an index that is read on the host.",
    ),
    "classes of a loss": Seam(
        "keras.src.backend.torch.nn:sparse_categorical_crossentropy",
        "Moves the classes of sequences to dim 1: all logits are copied, and their gradient.",
    ),
    "metric results": Seam(
        "keras.src.trainers.trainer:Trainer.get_metrics_result",
        "The states of all metrics are reduced together, before the first is read.",
    ),
    "results of an epoch": Seam(
        "keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs",
        "Steps whose results no callback reads have not computed them.",
    ),
    **{
        f"callbacks of {phase} steps": Seam(
            f"keras.src.callbacks.callback_list:CallbackList.on_{phase}_begin",
            "Only this list has the callbacks, which may read the results of each step.",
        )
        for phase in PHASES
    },
    "compilation": Seam(
        "keras.src.backend.torch.trainer:TorchTrainer._should_torch_compile",
        "torch.compile dies on Keras' own Python over sharded tensors: recordings are compiled.",
    ),
    "initial states": Seam(
        "keras.src.layers.rnn.rnn:RNN.get_initial_state",
        "Replicated, while the rows of the sequences are split.",
    ),
    "mask of a loss": Seam(
        "keras.src.losses.loss:apply_mask",
        "Multiplies sample weights in place, which an array on one device does not see.",
    ),
    "export": Seam(
        "keras.src.models.model:Model.export",
        "One rank exports full values; the others gather their shards.",
    ),
    "save model": Seam(
        "keras.src.saving.saving_lib:save_model",
        "Every rank would write the file; one does, the others gather their shards.",
    ),
    "save weights": Seam(
        "keras.src.saving.saving_lib:save_weights_only", "As for the whole model."
    ),
    "overwrite question": Seam(
        "keras.src.utils.io_utils:ask_to_proceed_with_overwrite",
        "One rank asks, and all use its answer.",
    ),
    **{
        f"files of {module}": Seam(
            f"keras.src.callbacks.{module}:file_utils",
            "Every rank would write the callback's files; one does.",
        )
        for module in CALLBACKS_WITH_FILES
    },
    "summaries": Seam(
        "keras.src.callbacks.tensorboard:TensorBoard.summary",
        "Every rank would write into one folder; one does.",
    ),
    "remote monitor": Seam(
        "keras.src.callbacks.remote_monitor:RemoteMonitor.on_epoch_end",
        "Every rank would send; one does.",
    ),
    "orbax": Seam(
        "keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint.set_model",
        "On torch every rank would write the same folder.",
    ),
    "messages": Seam("keras.src.utils.io_utils:print_msg", "One rank prints.", everywhere=True),
    "progress bar": Seam(
        "keras.src.callbacks.progbar_logger:ProgbarLogger.set_params", "One rank shows progress."
    ),
}
