"""All private Keras names that shardcore replaces or reads. `binding` imports it.

`lines` finds a name in the Keras that is installed; by `patches` a function declares which name it
replaces; the other files read and set private attributes.
"""

from shardcore.binding.keras_private.bookkeeping import FIXED as FIXED
from shardcore.binding.keras_private.bookkeeping import REFILLED as REFILLED
from shardcore.binding.keras_private.bookkeeping import RUNS_NOTED as RUNS_NOTED
from shardcore.binding.keras_private.bookkeeping import is_bookkeeping as is_bookkeeping
from shardcore.binding.keras_private.bookkeeping import is_callback as is_callback
from shardcore.binding.keras_private.files import change_exporter as change_exporter
from shardcore.binding.keras_private.files import gather_legacy as gather_legacy
from shardcore.binding.keras_private.files import gather_model as gather_model
from shardcore.binding.keras_private.files import gather_state as gather_state
from shardcore.binding.keras_private.files import is_remote as is_remote
from shardcore.binding.keras_private.files import weight_keys as weight_keys
from shardcore.binding.keras_private.models import ADAM as ADAM
from shardcore.binding.keras_private.models import NADAM as NADAM
from shardcore.binding.keras_private.models import DataAdapter as DataAdapter
from shardcore.binding.keras_private.models import EpochIterator as EpochIterator
from shardcore.binding.keras_private.models import children_of as children_of
from shardcore.binding.keras_private.models import code_of_user as code_of_user
from shardcore.binding.keras_private.models import gradient_of as gradient_of
from shardcore.binding.keras_private.models import graph_of as graph_of
from shardcore.binding.keras_private.models import graph_tensors as graph_tensors
from shardcore.binding.keras_private.models import hook_of as hook_of
from shardcore.binding.keras_private.models import input_names as input_names
from shardcore.binding.keras_private.models import is_tracker as is_tracker
from shardcore.binding.keras_private.models import layers_of as layers_of
from shardcore.binding.keras_private.models import matrix_axes as matrix_axes
from shardcore.binding.keras_private.models import modules_of as modules_of
from shardcore.binding.keras_private.models import moments_of as moments_of
from shardcore.binding.keras_private.models import nodes_of as nodes_of
from shardcore.binding.keras_private.models import operations_of as operations_of
from shardcore.binding.keras_private.models import parts_of as parts_of
from shardcore.binding.keras_private.models import producer_of as producer_of
from shardcore.binding.keras_private.models import track as track
from shardcore.binding.keras_private.models import uncleared_gradients as uncleared_gradients
from shardcore.binding.keras_private.models import weights_by_moment as weights_by_moment
from shardcore.binding.keras_private.nests import copy_mask as copy_mask
from shardcore.binding.keras_private.nests import leaves as leaves
from shardcore.binding.keras_private.nests import map_leaves as map_leaves
from shardcore.binding.keras_private.nests import map_pairs as map_pairs
from shardcore.binding.keras_private.nests import map_tensors as map_tensors
from shardcore.binding.keras_private.nests import pack_leaves as pack_leaves
from shardcore.binding.keras_private.patches import missing as missing
from shardcore.binding.keras_private.patches import replace as replace
from shardcore.binding.keras_private.patches import replaced as replaced
from shardcore.binding.keras_private.patches import wrap_calls as wrap_calls
from shardcore.binding.keras_private.patches import wrap_layer_calls as wrap_layer_calls
from shardcore.binding.keras_private.process import CURRENT_DISTRIBUTION as CURRENT_DISTRIBUTION
from shardcore.binding.keras_private.process import NAMING as NAMING
from shardcore.binding.keras_private.process import can_send as can_send
from shardcore.binding.keras_private.process import draw_seed as draw_seed
from shardcore.binding.keras_private.process import generator_of as generator_of
from shardcore.binding.keras_private.process import get_random_seed as get_random_seed
from shardcore.binding.keras_private.process import global_seed as global_seed
from shardcore.binding.keras_private.process import global_state_of as global_state_of
from shardcore.binding.keras_private.process import is_made_by_optimizer as is_made_by_optimizer
from shardcore.binding.keras_private.process import is_symbolic as is_symbolic
from shardcore.binding.keras_private.process import (
    is_symbolic_with_values as is_symbolic_with_values,
)
from shardcore.binding.keras_private.process import make_global_seed as make_global_seed
from shardcore.binding.keras_private.process import print_message as print_message
from shardcore.binding.keras_private.process import registered_objects as registered_objects
from shardcore.binding.keras_private.process import (
    restored_counts_and_seeds as restored_counts_and_seeds,
)
from shardcore.binding.keras_private.process import restored_generators as restored_generators
from shardcore.binding.keras_private.process import settings as settings
from shardcore.binding.keras_private.process import torch_device as torch_device
from shardcore.binding.keras_private.process import without_distribution as without_distribution
from shardcore.binding.keras_private.shapes import (
    drawing_without_values as drawing_without_values,
)
from shardcore.binding.keras_private.shapes import repeating_shapes as repeating_shapes
from shardcore.binding.keras_private.shapes import (
    variables_without_memory as variables_without_memory,
)
from shardcore.binding.keras_private.training import AUTO as AUTO
from shardcore.binding.keras_private.training import FILLS_CACHE as FILLS_CACHE
from shardcore.binding.keras_private.training import LOOP_STEPS as LOOP_STEPS
from shardcore.binding.keras_private.training import Auto as Auto
from shardcore.binding.keras_private.training import act_between_steps as act_between_steps
from shardcore.binding.keras_private.training import arrays_of as arrays_of
from shardcore.binding.keras_private.training import as_logs as as_logs
from shardcore.binding.keras_private.training import begin_at as begin_at
from shardcore.binding.keras_private.training import begin_later as begin_later
from shardcore.binding.keras_private.training import build_by as build_by
from shardcore.binding.keras_private.training import first_epoch as first_epoch
from shardcore.binding.keras_private.training import gives_own_logs as gives_own_logs
from shardcore.binding.keras_private.training import is_own_step as is_own_step
from shardcore.binding.keras_private.training import loader_of as loader_of
from shardcore.binding.keras_private.training import logs_of_step as logs_of_step
from shardcore.binding.keras_private.training import path_of as path_of
from shardcore.binding.keras_private.training import path_of_files as path_of_files
from shardcore.binding.keras_private.training import progress_of as progress_of
from shardcore.binding.keras_private.training import read_steps as read_steps
from shardcore.binding.keras_private.training import results_of as results_of
from shardcore.binding.keras_private.training import run_no_code_of_users as run_no_code_of_users
from shardcore.binding.keras_private.training import save_backup as save_backup
from shardcore.binding.keras_private.training import save_functions as save_functions
from shardcore.binding.keras_private.training import saves_at_epochs as saves_at_epochs
from shardcore.binding.keras_private.training import set_progress as set_progress
from shardcore.binding.keras_private.training import sort_callbacks as sort_callbacks
from shardcore.binding.keras_private.training import thread_name_of as thread_name_of
from shardcore.binding.keras_private.training import weights_path as weights_path
from shardcore.binding.keras_private.variables import Storage as Storage
from shardcore.binding.keras_private.variables import entries_of as entries_of
from shardcore.binding.keras_private.variables import initial_value as initial_value
from shardcore.binding.keras_private.variables import initialize as initialize
from shardcore.binding.keras_private.variables import is_seed as is_seed
from shardcore.binding.keras_private.variables import layout_map_of as layout_map_of
from shardcore.binding.keras_private.variables import layout_of as layout_of
from shardcore.binding.keras_private.variables import repr_with_value as repr_with_value
from shardcore.binding.keras_private.variables import set_batch_axes as set_batch_axes
from shardcore.binding.keras_private.variables import set_layout as set_layout
from shardcore.binding.keras_private.variables import set_storage as set_storage
from shardcore.binding.keras_private.variables import state_of as state_of
from shardcore.binding.keras_private.variables import storage_of as storage_of
from shardcore.binding.keras_private.variables import update_shape as update_shape
