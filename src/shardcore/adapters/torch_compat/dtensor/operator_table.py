"""The dispatcher of DTensor, changed while at least one scope asks for it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardcore.adapters.torch_compat.dtensor import costs, direct, planning
from shardcore.adapters.torch_compat.dtensor.dispatch import TORCHS_HANDLERS
from shardcore.adapters.torch_compat.operators import Handler, as_tuple, is_view
from shardcore.adapters.torch_compat.while_used import WhileUsed


class OperatorTable(WhileUsed):
    """What DTensor does with an operator, changed while at least one scope asks for it.

    torch 2.13: `DTensor._op_dispatcher` has no public way to say what happens where an operator
    has no sharding rule (`_propagate_op_sharding_dispatch_slow_path` raises), nor to replace one
    whose result is wrong (`_custom_op_handlers`).

    Args:
        handlers: Operators that are run by these functions instead.
        on_fallback: Told of an operator and its operands when they are replicated for it.
        on_view: Told of this rank's part of an operand, and of its parts of the views of it.
        on_copied_view: Told when an operand was redistributed so that a view of it could be taken:
            of the operand, the placements that it was brought into, and this rank's part then. The
            view has its memory.
    """

    def __init__(
        self,
        handlers: dict[Any, Handler],
        on_fallback: Callable[[Any, Any], None],
        on_view: Callable[[torch.Tensor, tuple[torch.Tensor, ...]], None],
        on_copied_view: Callable[[DTensor, Sequence[Placement], torch.Tensor], None],
    ) -> None:
        self._handlers = handlers
        self._on_fallback = on_fallback
        self._on_view = on_view
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
        plan = direct.direct_sharding(info.schema)
        if plan is not None:
            return planning.reshaping(plan, info.schema)
        settled = planning.settled_schema(operator, info.schema)
        if settled is not None:
            return planning.after_settling(settled)
        dispatcher: Any = DTensor._op_dispatcher
        rule = type(dispatcher)._propagate_op_sharding_dispatch_slow_path
        try:
            sharding = rule(dispatcher, operator, args, kwargs, info, cached)
        except (NotImplementedError, RuntimeError) as error:
            try:
                replicated = planning.replicated_sharding(info)
            except planning.NoPlanError as reason:
                raise planning.no_plan(operator, info, error, reason) from error
            self._on_fallback(operator, (args, kwargs))
            return replicated
        planning.check_target_stays(info.schema, sharding)
        if planning.scatters_a_sum(sharding, info.schema) or planning.adds_integers(
            sharding, info.schema
        ):
            return planning.after_settling(planning.settled(info.schema))
        if planning.is_distrusted(operator, info.schema, sharding):
            try:
                replicated = planning.replicated_sharding(info)
                self._on_fallback(operator, (args, kwargs))
                return replicated
            except planning.NoPlanError:  # it writes, and goes on as it is planned
                if planning.divides_integers(sharding, info.schema):
                    raise
        return planning.reshaping(sharding, info.schema)

    def _results(self, operator: Any, args: tuple[Any, ...], info: Any) -> Any:
        dispatcher: Any = DTensor._op_dispatcher
        run = type(dispatcher)._dispatch_get_local_results_slow_path
        parts = run(dispatcher, operator, args, info)
        if is_view(operator):
            self._on_view(info.local_args[0], as_tuple(parts))
            if planning.moves_first(args, info.output_sharding):
                moved = info.output_sharding.redistribute_schema.args_schema[0].placements
                self._on_copied_view(args[0], moved, info.local_args[0])
        return parts


# torch 2.13: advice that a user of Keras can do nothing about, given once by every rank.
_CHATTY = {
    "torch.distributed.tensor._collective_utils": "CPU process group does not support alltoall",
    "torch.distributed.tensor._redistribute": "While redistributing from",
}


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_CHATTY.get(record.name, "\0"))


def out_operators() -> list[Any]:
    """The operators with `out=` that DTensor has a rule for; the others raise.

    torch 2.13: the tables of rules are the only list of them.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs)
    known = {operator for table in (propagator.op_to_rules, *tables) for operator in table}
    return [each for each in known if any(arg.is_out for arg in each._schema.arguments)]
