"""The planners and handlers of all operators: import them from here."""

from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.operators import (
    attention,
    composed,
    layers,
    linear,
    lookups,
    pointwise,
    pools,
    random,
    recurrent,
    reductions,
    slicing,
    views,
)
from shardcore.adapters.engine.redistribution import full
from shardcore.adapters.engine.task import Handler, Operator, Planner, by_operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import reshape, run_full


def _item(operator: Operator, tensor: ShardedTensor) -> Any:
    tensor.meet_to_read()
    return operator(full(tensor))


def _equal(operator: Operator, one: torch.Tensor, other: torch.Tensor) -> bool:
    for tensor in (one, other):
        if isinstance(tensor, ShardedTensor):
            tensor.meet_to_read()
    one, other = (
        full(tensor) if isinstance(tensor, ShardedTensor) else tensor for tensor in (one, other)
    )
    return bool(operator(one, other))


def _pack(operator: Operator, *args: object, **kwargs: object) -> tuple[Any, torch.Tensor]:
    """Packs padded sequences; recurrences read the sizes in C++, so these are plain."""
    data, sizes = run_full(operator, *args, **kwargs)
    return data, full(sizes)


def _recurrent(operator: Operator, *args: object, **kwargs: object) -> Any:
    """Runs an LSTM of the CPU, which stores tensors for its gradient only if gradients are on."""
    with torch.enable_grad():
        return run_full(operator, *args, **kwargs)


_OTHERS: dict[Any, Handler] = {
    torch_private.ITEM: _item,
    torch_private.PACK: _pack,
    **by_operator(
        {
            "equal": _equal,
            "mkldnn_rnn_layer": _recurrent,
            "squeeze_ squeeze_.dim squeeze_.dims t_ transpose_ unsqueeze_": reshape,
        }
    ),
}
_PLANNERS = [
    module.PLANNERS
    for module in (
        attention, pointwise, views, slicing, reductions, composed, linear, lookups, layers, pools,
        recurrent,
    )
]  # fmt: skip
_HANDLERS = [
    _OTHERS,
    *(module.HANDLERS for module in (pointwise, reductions, lookups, random, linear)),
]
PLANNERS: dict[Any, Planner] = {
    operator: table[operator] for table in _PLANNERS for operator in table
}
HANDLERS: dict[Any, Handler] = {
    operator: table[operator] for table in _HANDLERS for operator in table
}
_COUNT = sum(map(len, (*_PLANNERS, *_HANDLERS)))
assert len(PLANNERS | HANDLERS) == _COUNT, "one operator has two entries"
