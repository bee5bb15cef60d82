"""What becomes of an operator on slices: split by its rule, drawn, written, or run whole."""

from typing import Any

import torch

from shardcore.adapters import split_losses, split_operators
from shardcore.adapters.slices import (
    elementwise,
    lists,
    lookups,
    products,
    random,
    reductions,
    statistics,
    views,
    writes,
)
from shardcore.adapters.slices.copies import refresh
from shardcore.adapters.slices.split import run_split
from shardcore.adapters.slices.tensor import Slice, settled, whole
from shardcore.adapters.slices.whole import run_whole, run_whole_and_store
from shardcore.adapters.torch_compat import (
    ITEM,
    Handler,
    is_composite,
    is_elementwise,
    is_list_operator,
    tree_leaves,
    writes_first,
    writes_others,
)


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`operator` on operands of which some are slices."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, Slice):
            refresh(each)
    with torch.no_grad():
        return _handler(operator, args)(operator, args, kwargs)


def _handler(operator: Any, args: tuple[Any, ...]) -> Handler:
    if operator in HANDLERS:
        return HANDLERS[operator]
    if is_list_operator(operator):
        return lists.on_list
    if writes_others(operator):
        return run_whole_and_store
    if writes_first(operator):
        return writes.write
    if is_elementwise(operator) and not any(isinstance(each, list) for each in args):
        return elementwise.elementwise
    return _composed if is_composite(operator) else run_whole


def _composed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that is made of others, each of which comes here again."""
    return operator.decompose(*args, **kwargs)


def _item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`float(x)`, `x.item()`: of the whole."""
    return operator(whole(args[0]), **kwargs)


def _recurrent(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An LSTM of the CPU: what its gradient reads is made only where gradients are on."""
    with torch.enable_grad():
        return run_whole(operator, args, kwargs)


HANDLERS: dict[Any, Handler] = {
    ITEM: _item,
    torch.ops.aten.mkldnn_rnn_layer.default: _recurrent,
    **split_operators.handlers(run_split),
    **split_losses.handlers(run_split, settled),
    **elementwise.HANDLERS,
    **views.HANDLERS,
    **reductions.HANDLERS,
    **products.HANDLERS,
    **lookups.HANDLERS,
    **random.HANDLERS,
    **statistics.HANDLERS,
    **writes.HANDLERS,
}


Slice.run = staticmethod(run)
