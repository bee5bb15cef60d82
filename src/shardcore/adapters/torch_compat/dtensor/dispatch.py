"""The dispatcher of DTensor, from below a handler that stands before it."""

import threading
from typing import Any

from torch.distributed.tensor import DTensor

from shardcore.adapters.torch_compat.operators import Handler, reshaped_in_place

# Held while a handler is out of the dispatcher, where another thread would miss it.
ONE_AT_A_TIME = threading.RLock()


TORCHS_HANDLERS: dict[Any, Handler] = dict(DTensor._op_dispatcher._custom_op_handlers)


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor makes of `operator`, called from the handler that stands before it.

    torch 2.13: the dispatcher is written in C++ and looks into `_custom_op_handlers` first; there
    is no way to tell it to go on.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    with ONE_AT_A_TIME:
        handler = handlers.pop(operator)
        if operator in TORCHS_HANDLERS:
            handlers[operator] = TORCHS_HANDLERS[operator]
        try:
            return operator(*args, **kwargs)
        finally:
            handlers[operator] = handler


def become(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: DTensor) -> Any:
    """The first operand, now with the shape, the placements and the memory of `value`.

    torch 2.13: this is what the dispatcher does after an operator with the tag `inplace_view`.
    """
    target: Any = args[0]
    target._local_tensor = value._local_tensor
    target._spec = value._spec
    return reshaped_in_place(operator, args, kwargs, target)
