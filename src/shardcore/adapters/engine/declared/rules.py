"""The declared rules of this process, and the planner of operators that have one."""

from collections.abc import Sequence
from typing import Any

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


def rule_of_call(
    operator: Operator, args: Args, kwargs: Kwargs
) -> tuple[OperatorRule, list[Any]]:
    """Finds the declared rule of a call, and its operands in the order of the rule.

    An operand that may be None, and is, has no term in the rule of the call.

    Raises:
        RuleError: If the rule does not hold without it.
    """
    values = arguments_of(operator, args, kwargs)
    operands = [values.get(argument.name) for argument in tensor_arguments(operator)]
    absent = {number for number, operand in enumerate(operands) if operand is None}
    rule = without_operands(_RULES[operator], absent)
    return rule, [operand for operand in operands if operand is not None]


def planner_of(operator: Operator) -> Planner | None:
    """Chooses the planner of an operator with a declared rule; None for another one."""
    return _plan if operator in _RULES else None


def _plan(operator: Operator, *args: object, **kwargs: object) -> Task | None:
    """Plans a call; None for operands that the rule does not fit: these are full then."""
    try:
        rule, operands = rule_of_call(operator, args, kwargs)
        shapes = _result_shapes(rule, operands)
    except (RuleError, LayoutError):
        return None
    contiguous = [operand.form.is_contiguous for operand in operands]

    def compute(parts: Parts) -> list[torch.Tensor]:
        # A kernel may read memory as on one device: what is contiguous there is so here.
        ordered = (
            part.contiguous() if is_contiguous else part
            for part, is_contiguous in zip(parts, contiguous, strict=True)
        )
        shards = dict(zip(operands, ordered, strict=True))

        def local(argument: object) -> object:
            return shards[argument] if isinstance(argument, Operand) else argument

        named = {name: local(argument) for name, argument in kwargs.items()}
        results = operator(*map(local, args), **named)
        return [result.contiguous() for result in as_tuple(results)]

    return Task(rule, operands, compute, shapes)


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
