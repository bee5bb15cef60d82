"""All private Keras names that shardcore replaces or reads. `binding` imports it.

They are those of Keras 3.15 on torch. `table` has the replaced ones, each with a reason.
"""

from shardcore.binding.seams.ambient import CURRENT_DISTRIBUTION as CURRENT_DISTRIBUTION
from shardcore.binding.seams.ambient import current_distribution as current_distribution
from shardcore.binding.seams.ambient import draw_seed as draw_seed
from shardcore.binding.seams.ambient import forget_distribution as forget_distribution
from shardcore.binding.seams.ambient import generators_kept as generators_kept
from shardcore.binding.seams.ambient import global_seed as global_seed
from shardcore.binding.seams.ambient import is_made_by_optimizer as is_made_by_optimizer
from shardcore.binding.seams.ambient import is_symbolic as is_symbolic
from shardcore.binding.seams.ambient import settings as settings
from shardcore.binding.seams.ambient import torch_device as torch_device
from shardcore.binding.seams.ambient import unnoticed as unnoticed
from shardcore.binding.seams.ambient import user_seed as user_seed
from shardcore.binding.seams.ambient import without_distribution as without_distribution
from shardcore.binding.seams.files import can_send as can_send
from shardcore.binding.seams.files import gather_model as gather_model
from shardcore.binding.seams.files import gather_state as gather_state
from shardcore.binding.seams.files import is_remote as is_remote
from shardcore.binding.seams.files import print_message as print_message
from shardcore.binding.seams.models import RUNS_NOTED as RUNS_NOTED
from shardcore.binding.seams.models import copy_mask as copy_mask
from shardcore.binding.seams.models import hook_of as hook_of
from shardcore.binding.seams.models import is_bookkeeping as is_bookkeeping
from shardcore.binding.seams.models import is_layer as is_layer
from shardcore.binding.seams.models import is_seed as is_seed
from shardcore.binding.seams.models import is_variable as is_variable
from shardcore.binding.seams.models import leaves as leaves
from shardcore.binding.seams.models import map_leaves as map_leaves
from shardcore.binding.seams.models import map_tensors as map_tensors
from shardcore.binding.seams.models import modules_of as modules_of
from shardcore.binding.seams.models import moments_of as moments_of
from shardcore.binding.seams.models import parts_of as parts_of
from shardcore.binding.seams.rebinding import Rebinding as Rebinding
from shardcore.binding.seams.rebinding import around as around
from shardcore.binding.seams.table import CALLBACKS_WITH_FILES as CALLBACKS_WITH_FILES
from shardcore.binding.seams.table import DRAWS as DRAWS
from shardcore.binding.seams.table import PHASES as PHASES
from shardcore.binding.seams.table import RUNS as RUNS
from shardcore.binding.seams.table import SEAMS as SEAMS
from shardcore.binding.seams.table import STEPS as STEPS
from shardcore.binding.seams.training import AUTO as AUTO
from shardcore.binding.seams.training import Auto as Auto
from shardcore.binding.seams.training import arrays_of as arrays_of
from shardcore.binding.seams.training import gives_own_logs as gives_own_logs
from shardcore.binding.seams.training import is_own_step as is_own_step
from shardcore.binding.seams.training import read_steps as read_steps
from shardcore.binding.seams.training import unpack as unpack
