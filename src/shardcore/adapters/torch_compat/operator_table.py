"""The dispatcher of DTensor, changed while at least one scope asks for it."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardcore.adapters.torch_compat import costs, planning
from shardcore.adapters.torch_compat.operators import TORCHS_HANDLERS, Handler, is_view
from shardcore.adapters.torch_compat.while_used import WhileUsed


class OperatorTable(WhileUsed):
    """What DTensor does with an operator, changed while at least one scope asks for it.

    torch 2.13: `DTensor._op_dispatcher` has no public way to say what happens where an operator
    has no sharding rule (`_propagate_op_sharding_dispatch_slow_path` raises), nor to replace one
    whose result is wrong (`_custom_op_handlers`).

    Args:
        handlers: Operators that are run by these functions instead.
        on_fallback: Told of an operator and its operands when they are replicated for it.
        on_copied_view: Told of a view, its operands and this rank's parts of the results, when an
            operand was redistributed for it: it has memory of its own.
    """

    def __init__(
        self,
        handlers: dict[Any, Handler],
        on_fallback: Callable[[Any, Any], None],
        on_copied_view: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
    ) -> None:
        self._handlers = handlers
        self._on_fallback = on_fallback
        self._on_copied_view = on_copied_view

    def _put(self) -> None:
        planning.warn_if_unknown(torch.__version__)
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher._custom_op_handlers.update(self._handlers)
        dispatcher._propagate_op_sharding_dispatch_slow_path = self._propagate
        dispatcher._dispatch_get_local_results_slow_path = self._results
        dispatcher._try_replicate_spec_for_scalar_tensor = planning.promoted_spec
        costs.replace_costs()
        for name in _CHATTY:
            logging.getLogger(name).addFilter(_is_no_advice)

    def _take_back(self) -> None:
        dispatcher: Any = DTensor._op_dispatcher
        for operator in self._handlers:
            del dispatcher._custom_op_handlers[operator]
        dispatcher._custom_op_handlers.update(TORCHS_HANDLERS)
        del dispatcher._propagate_op_sharding_dispatch_slow_path
        del dispatcher._dispatch_get_local_results_slow_path
        del dispatcher._try_replicate_spec_for_scalar_tensor
        costs.restore_costs()
        for name in _CHATTY:
            logging.getLogger(name).removeFilter(_is_no_advice)

    def _propagate(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, cached: bool
    ) -> Any:
        settled = planning.settled_schema(operator, info.schema)
        if settled is not None:
            return planning.after_settling(settled)
        dispatcher: Any = DTensor._op_dispatcher
        rule = type(dispatcher)._propagate_op_sharding_dispatch_slow_path
        try:
            sharding = rule(dispatcher, operator, args, kwargs, info, cached)
        except (NotImplementedError, RuntimeError):
            replicated = planning.replicated_sharding(info)
            if replicated is None:
                raise
            self._on_fallback(operator, (args, kwargs))
            return replicated
        if planning.is_distrusted(operator, info.schema, sharding):
            replicated = planning.replicated_sharding(info)
            if replicated is not None:
                self._on_fallback(operator, (args, kwargs))
                return replicated
        return planning.reshaping(sharding, info.schema)

    def _results(self, operator: Any, args: tuple[Any, ...], info: Any) -> Any:
        dispatcher: Any = DTensor._op_dispatcher
        run = type(dispatcher)._dispatch_get_local_results_slow_path
        parts = run(dispatcher, operator, args, info)
        if is_view(operator) and planning.moves_first(args, info.output_sharding):
            self._on_copied_view(operator, args, info.local_kwargs, parts)
        return parts


# torch 2.13: advice that a user of Keras can do nothing about, given once by every rank.
_CHATTY = {
    "torch.distributed.tensor._collective_utils": "CPU process group does not support alltoall",
    "torch.distributed.tensor._redistribute": "While redistributing from",
}


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_CHATTY.get(record.name, "\0"))
