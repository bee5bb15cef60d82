"""All private torch names that shardcore uses, each with its versions and a reason.

Known for torch 2.13. What is private to DTensor stands in `torch_compat.dtensor`.
"""

from shardcore.adapters.torch_compat import collectives as collectives
from shardcore.adapters.torch_compat import inductor as inductor
from shardcore.adapters.torch_compat.collectives import Started as Started
from shardcore.adapters.torch_compat.collectives import all_reduce_in_place as all_reduce_in_place
from shardcore.adapters.torch_compat.collectives import collective_name as collective_name
from shardcore.adapters.torch_compat.collectives import is_all_reduce as is_all_reduce
from shardcore.adapters.torch_compat.collectives import is_collective as is_collective
from shardcore.adapters.torch_compat.collectives import is_of_collectives as is_of_collectives
from shardcore.adapters.torch_compat.collectives import is_wait as is_wait
from shardcore.adapters.torch_compat.collectives import wait_for as wait_for
from shardcore.adapters.torch_compat.dispatch_modes import CollectiveListener as CollectiveListener
from shardcore.adapters.torch_compat.dispatch_modes import OperatorListener as OperatorListener
from shardcore.adapters.torch_compat.onednn import OneDnn as OneDnn
from shardcore.adapters.torch_compat.onednn import has_onednn as has_onednn
from shardcore.adapters.torch_compat.onednn import is_intel as is_intel
from shardcore.adapters.torch_compat.operators import LIST_COPY as LIST_COPY
from shardcore.adapters.torch_compat.operators import as_tuple as as_tuple
from shardcore.adapters.torch_compat.operators import aten_name as aten_name
from shardcore.adapters.torch_compat.operators import direct as direct
from shardcore.adapters.torch_compat.operators import draws as draws
from shardcore.adapters.torch_compat.operators import is_composite as is_composite
from shardcore.adapters.torch_compat.operators import is_elementwise as is_elementwise
from shardcore.adapters.torch_compat.operators import is_fused as is_fused
from shardcore.adapters.torch_compat.operators import is_list_operator as is_list_operator
from shardcore.adapters.torch_compat.operators import is_view as is_view
from shardcore.adapters.torch_compat.operators import kind_of_results as kind_of_results
from shardcore.adapters.torch_compat.operators import number_of_results as number_of_results
from shardcore.adapters.torch_compat.operators import out_of_place as out_of_place
from shardcore.adapters.torch_compat.operators import reads_values as reads_values
from shardcore.adapters.torch_compat.operators import reshaped_in_place as reshaped_in_place
from shardcore.adapters.torch_compat.operators import writes_first as writes_first
from shardcore.adapters.torch_compat.operators import writes_others as writes_others
from shardcore.adapters.torch_compat.operators import writing_into as writing_into
from shardcore.adapters.torch_compat.operators import written_operands as written_operands
from shardcore.adapters.torch_compat.tensors import NO_TORCH_FUNCTION as NO_TORCH_FUNCTION
from shardcore.adapters.torch_compat.tensors import accumulated as accumulated
from shardcore.adapters.torch_compat.tensors import after_backward as after_backward
from shardcore.adapters.torch_compat.tensors import backward_pass as backward_pass
from shardcore.adapters.torch_compat.tensors import current_node as current_node
from shardcore.adapters.torch_compat.tensors import hooks_of as hooks_of
from shardcore.adapters.torch_compat.tensors import identity_of as identity_of
from shardcore.adapters.torch_compat.tensors import memory_of as memory_of
from shardcore.adapters.torch_compat.tensors import nodes_made as nodes_made
from shardcore.adapters.torch_compat.tensors import version_of as version_of
from shardcore.adapters.torch_compat.tensors import wrapper as wrapper
from shardcore.adapters.torch_compat.trees import Args as Args
from shardcore.adapters.torch_compat.trees import Kwargs as Kwargs
from shardcore.adapters.torch_compat.trees import tree_leaves as tree_leaves
from shardcore.adapters.torch_compat.trees import tree_map as tree_map
from shardcore.adapters.torch_compat.trees import tree_map_only as tree_map_only
from shardcore.adapters.torch_compat.unnamed_operators import ADAPTIVE_AVERAGES as ADAPTIVE_AVERAGES
from shardcore.adapters.torch_compat.unnamed_operators import CPU_ATTENTION as CPU_ATTENTION
from shardcore.adapters.torch_compat.unnamed_operators import (
    CPU_ATTENTION_BACKWARD as CPU_ATTENTION_BACKWARD,
)
from shardcore.adapters.torch_compat.unnamed_operators import ITEM as ITEM
from shardcore.adapters.torch_compat.unnamed_operators import LIST_NORM as LIST_NORM
from shardcore.adapters.torch_compat.unnamed_operators import SOFTMAX as SOFTMAX
from shardcore.adapters.torch_compat.unnamed_operators import SOFTMAX_BACKWARD as SOFTMAX_BACKWARD
from shardcore.adapters.torch_compat.unnamed_operators import TO_COPY as TO_COPY
from shardcore.adapters.torch_compat.unnamed_operators import UNSAFE_VIEW as UNSAFE_VIEW
