"""The declared rules of this process, and the planner of operators that have one."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.task import Operand, Operator, Parts, Planner, Task
from shardcore.adapters.torch_private import Args, Kwargs, arguments_of, as_tuple
from shardcore.adapters.torch_private.signatures import tensor_arguments
from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.call import Call, Shapes
from shardcore.domain.engine.rules.declared import without_operands
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.errors import LayoutError, RuleError

# By operator: torch keeps the operators of a process, and this their rules.
_RULES: dict[Operator, OperatorRule] = {}


def add(operator: Operator, rule: OperatorRule) -> None:
    """Adds the rule of an operator."""
    _RULES[operator] = rule


def find(operator: Operator) -> OperatorRule | None:
    """Looks up the rule that was declared for `operator`, None without one."""
    return _RULES.get(operator)


def texts() -> dict[str, str]:
    """Writes all declared rules, by the names of their operators: ranks compare them."""
    return {str(operator): str(rule) for operator, rule in _RULES.items()}


@attrs.frozen(eq=False)
class DeclaredCall:
    """A call of an operator with a declared rule."""

    operator: Operator
    rule: OperatorRule  # without the terms of operands that are None
    operands: dict[str, Any]  # its tensors, in the order of the rule, by the names of arguments
    others: dict[str, Any]  # its other arguments

    @classmethod
    def of(cls, operator: Operator, args: Args, kwargs: Kwargs) -> "DeclaredCall":
        """Separates the operands from the other arguments.

        Raises:
            RuleError: If the rule does not hold without an operand that is None.
        """
        values = arguments_of(operator, args, kwargs)
        names = [argument.name for argument in tensor_arguments(operator)]
        absent = {number for number, name in enumerate(names) if values.get(name) is None}
        operands = {name: values.pop(name) for n, name in enumerate(names) if n not in absent}
        return cls(operator, without_operands(_RULES[operator], absent), operands, values)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Runs the operator on other tensors in the place of its operands."""
        given = dict(zip(self.operands, tensors, strict=True))
        return as_tuple(self.operator(**given, **self.others))


def planner_of(operator: Operator) -> Planner | None:
    """Chooses the planner of an operator with a declared rule; None for another one."""
    return _plan if operator in _RULES else None


def _plan(operator: Operator, *args: object, **kwargs: object) -> Task | None:
    """Plans a call; None for operands that the rule does not fit: these are full then."""
    try:
        call = DeclaredCall.of(operator, args, kwargs)
        operands = list(call.operands.values())
        shapes = _result_shapes(call.rule, operands)
    except (RuleError, LayoutError):
        return None

    def compute(parts: Parts) -> list[torch.Tensor]:
        return [result.contiguous() for result in call.run(parts)]

    return Task(call.rule, operands, compute, shapes)


def _result_shapes(rule: OperatorRule, operands: Sequence[Operand]) -> Shapes:
    """Computes the global shapes of the results, with 1 for a dim that no factor has.

    Raises:
        LayoutError: If the rule does not fit the shapes of the operands.
    """
    placed = tuple(operand.placed(operand.form) for operand in operands)
    extents = Call(rule, placed, (), False, Costs()).extents
    return tuple(
        tuple(1 if dim.factor is None else dim.size(extents) for dim in result.dims)
        for result in rule.results
    )
