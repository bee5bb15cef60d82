"""The private names of `torch.distributed.tensor`. Importing this needs DTensor.

Known for torch 2.13.
"""

from shardcore.adapters.torch_compat.dtensor.dispatch import ONE_AT_A_TIME, as_torch_does, become
from shardcore.adapters.torch_compat.dtensor.everywhere import EveryThread
from shardcore.adapters.torch_compat.dtensor.operator_table import OperatorTable, out_operators
from shardcore.adapters.torch_compat.dtensor.planning import NoPlanError, is_known, moves
from shardcore.adapters.torch_compat.dtensor.tensors import (
    local_tensor,
    ordered_placements,
    plain_placements,
    set_promotion,
    writes_into,
)

__all__ = [
    "ONE_AT_A_TIME",
    "EveryThread",
    "NoPlanError",
    "OperatorTable",
    "as_torch_does",
    "become",
    "is_known",
    "local_tensor",
    "moves",
    "ordered_placements",
    "out_operators",
    "plain_placements",
    "set_promotion",
    "writes_into",
]
