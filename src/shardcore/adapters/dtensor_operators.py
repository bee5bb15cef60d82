"""Operators that DTensor has no rule for, or runs wrongly: what is done instead.

Known for torch 2.13. The last resort is the fall-back: operands are replicated, the operator runs
on each rank, the result is right, and one warning names the operator.
"""

from typing import Any

from shardcore.adapters import (
    dtensor_argmax,
    dtensor_lookups,
    dtensor_norms,
    dtensor_own_copies,
    dtensor_pending,
    dtensor_random,
    dtensor_rules,
    dtensor_softmax,
    dtensor_statistics,
    dtensor_trust,
    dtensor_views,
    dtensor_weights,
    dtensor_writes,
    fallback,
    torch_compat,
)
from shardcore.adapters.torch_compat import dtensor as dtensor_compat


def _item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`float(x)`, `x.item()`: of the global value. DTensor reads this rank's pending part."""
    return operator(args[0].full_tensor(), **kwargs)


_HANDLERS: dict[Any, torch_compat.Handler] = {
    **dtensor_trust.HANDLERS,
    **dtensor_lookups.HANDLERS,
    **dtensor_views.HANDLERS,
    **dtensor_writes.HANDLERS,
    **dtensor_pending.HANDLERS,
    **dtensor_random.HANDLERS,
    **dtensor_statistics.HANDLERS,
    **dtensor_norms.HANDLERS,
    **dtensor_softmax.HANDLERS,
    **dtensor_argmax.HANDLERS,
    **dtensor_rules.HANDLERS,
    torch_compat.ITEM: _item,
}
OPERATORS = dtensor_compat.OperatorTable(
    handlers=_HANDLERS | dtensor_weights.handlers(_HANDLERS),
    on_fallback=fallback.tell,
    on_view=dtensor_own_copies.viewed,
    on_copied_view=dtensor_views.taken,
)
