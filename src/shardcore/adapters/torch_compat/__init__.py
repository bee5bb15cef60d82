"""Every private torch name that shardcore touches, with the versions it is known in and why.

Known for torch 2.13.
"""

from shardcore.adapters.torch_compat.everywhere import EveryThread
from shardcore.adapters.torch_compat.listening import COLLECTIVES, CollectiveListener
from shardcore.adapters.torch_compat.operator_table import OperatorTable
from shardcore.adapters.torch_compat.operators import (
    ADAPTIVE_AVERAGES,
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    CTC_LOSS,
    ITEM,
    ONE_AT_A_TIME,
    UNIQUE,
    Handler,
    as_torch_does,
    become,
    frozen,
    list_writing_operators,
    number_of_results,
    out_of_place,
    reshaping_operators,
    tree_leaves,
    tree_map_only,
    writes_first,
    writing_operators,
)
from shardcore.adapters.torch_compat.planning import is_known, moves
from shardcore.adapters.torch_compat.tensors import (
    base_of,
    local_tensor,
    ordered_placements,
    plain_placements,
    same_view,
    set_promotion,
    store_for_thread,
)
from shardcore.adapters.torch_compat.workers import wait_for_workers

__all__ = [
    "ADAPTIVE_AVERAGES",
    "COLLECTIVES",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "CTC_LOSS",
    "ITEM",
    "ONE_AT_A_TIME",
    "UNIQUE",
    "CollectiveListener",
    "EveryThread",
    "Handler",
    "OperatorTable",
    "as_torch_does",
    "base_of",
    "become",
    "frozen",
    "is_known",
    "list_writing_operators",
    "local_tensor",
    "moves",
    "number_of_results",
    "ordered_placements",
    "out_of_place",
    "plain_placements",
    "reshaping_operators",
    "same_view",
    "set_promotion",
    "store_for_thread",
    "tree_leaves",
    "tree_map_only",
    "wait_for_workers",
    "writes_first",
    "writing_operators",
]
