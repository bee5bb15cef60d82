"""The registry of operators: how each is run, said once."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from shardcore.adapters.engine.planned import Task
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
        >>> registry.plan(["add"], lambda operator, args, kwargs: None)
        >>> registry.run(["add"], lambda operator, args, kwargs: None)
        Traceback (most recent call last):
            ...
        shardcore.domain.errors.RuleError: Operator 'add' is registered twice: ...
    """

    planners: dict[Any, Planner] = attrs.field(factory=dict)
    handlers: dict[Any, Handler] = attrs.field(factory=dict)

    def plan(self, operators: Iterable[Any], planner: Planner) -> None:
        """Plan `operators` by `planner`.

        Raises:
            RuleError: If one is registered already.
        """
        for operator in operators:
            self._check(operator)
            self.planners[operator] = planner

    def run(self, operators: Iterable[Any], handler: Handler) -> None:
        """Run `operators` by `handler`.

        Raises:
            RuleError: If one is registered already.
        """
        for operator in operators:
            self._check(operator)
            self.handlers[operator] = handler

    def add(self, planners: Mapping[Any, Planner], handlers: Mapping[Any, Handler]) -> None:
        """Register the operators of one module."""
        for operator, planner in planners.items():
            self.plan([operator], planner)
        for operator, handler in handlers.items():
            self.run([operator], handler)

    def _check(self, operator: Any) -> None:
        if operator in self.planners or operator in self.handlers:
            raise RuleError(
                f"Operator {operator!r} is registered twice: one entry decides how it is run."
            )
