"""Every Keras name that shardcore replaces or reads: the only such place.

Known for Keras 3.15 on torch. `table` has those that are replaced, each with its reason.
"""

from shardcore.binding.seams.ambient import (
    CURRENT_DISTRIBUTION,
    current_distribution,
    draw_seed,
    forget_distribution,
    global_seed,
    is_made_by_optimizer,
    is_symbolic,
    layer_path,
    torch_device,
    unnoticed,
    user_seed,
)
from shardcore.binding.seams.files import (
    can_send,
    gather_model,
    gather_state,
    is_remote,
    print_message,
)
from shardcore.binding.seams.models import (
    RUNS_NOTED,
    hook_of,
    is_bookkeeping,
    is_layer,
    is_seed,
    is_variable,
    modules_of,
    parts_of,
)
from shardcore.binding.seams.optimizers import moments_of
from shardcore.binding.seams.rebinding import Rebinding
from shardcore.binding.seams.structures import copy_mask, leaves, map_leaves, map_tensors
from shardcore.binding.seams.table import KERAS_VERSIONS, RUNS, SEAMS, Seam
from shardcore.binding.seams.training import (
    AUTO,
    Auto,
    arrays_of,
    gives_own_logs,
    is_own_step,
    read_steps,
    unpack,
)

__all__ = [
    "AUTO",
    "CURRENT_DISTRIBUTION",
    "KERAS_VERSIONS",
    "RUNS",
    "RUNS_NOTED",
    "SEAMS",
    "Auto",
    "Rebinding",
    "Seam",
    "arrays_of",
    "can_send",
    "copy_mask",
    "current_distribution",
    "draw_seed",
    "forget_distribution",
    "gather_model",
    "gather_state",
    "gives_own_logs",
    "global_seed",
    "hook_of",
    "is_bookkeeping",
    "is_layer",
    "is_made_by_optimizer",
    "is_own_step",
    "is_remote",
    "is_seed",
    "is_symbolic",
    "is_variable",
    "layer_path",
    "leaves",
    "map_leaves",
    "map_tensors",
    "modules_of",
    "moments_of",
    "parts_of",
    "print_message",
    "read_steps",
    "torch_device",
    "unnoticed",
    "unpack",
    "user_seed",
]
