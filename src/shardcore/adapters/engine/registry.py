"""The registry of operators: how each is run, said once."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from shardcore.adapters.engine.plans.task import Task
from shardcore.domain.errors import RuleError

# Runs an operator on its arguments, sharded tensors among them.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
# Makes the task of an operator of its arguments, with an `Operand` in the place of each tensor; or
# gives the handler that runs it on such operands, or None where it is run on full operands.
Planner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Task | Handler | None]


@attrs.define
class Registry:
    """By operator, how it is planned, or how it is run where a rule is not enough.

    Example:
        >>> registry = Registry()
        >>> registry.add({"add": lambda operator, args, kwargs: None}, {})
        >>> registry.add({}, {"add": lambda operator, args, kwargs: None})
        Traceback (most recent call last):
            ...
        shardcore.domain.errors.RuleError: Operator 'add' is registered twice: ...
    """

    planners: dict[Any, Planner] = attrs.field(factory=dict)
    handlers: dict[Any, Handler] = attrs.field(factory=dict)

    def add(self, planners: Mapping[Any, Planner], handlers: Mapping[Any, Handler]) -> None:
        """Register the operators of one module.

        Raises:
            RuleError: If one is registered already.
        """
        entries = Counter((*self.planners, *self.handlers, *planners, *handlers))
        for operator, count in entries.items():
            if count > 1:
                raise RuleError(
                    f"Operator {operator!r} is registered twice: one entry decides how it is run."
                )
        self.planners.update(planners)
        self.handlers.update(handlers)
