"""The signatures of operators, from their schemas: what a declared rule has to fit."""

from typing import Any, TypeGuard

import torch

from shardcore.adapters.torch_private.operators import Operator, draws
from shardcore.domain.engine.rules.declared import OperatorSignature

_TENSORS = ("Tensor", "Optional[Tensor]")


def is_operator(value: object) -> TypeGuard[Operator]:
    """Tells an operator, `torch.ops.aten.mm.default`, from its packet, `torch.ops.aten.mm`."""
    return isinstance(value, type(torch.ops.aten.mm.default))


def signature_of(operator: Operator) -> OperatorSignature:
    """Reads the names of the operands, and counts the results."""
    operands = tuple(argument.name for argument in tensor_arguments(operator))
    return OperatorSignature(str(operator), operands, len(operator._schema.returns))


def tensor_arguments(operator: Operator) -> list[Any]:
    """Lists the arguments that are tensors, or None in their place, in order."""
    return [argument for argument in operator._schema.arguments if str(argument.type) in _TENSORS]


def why_no_rule(operator: Operator) -> str | None:
    """Says what the operator does so that no rule can hold for it, None if one can.

    An operator on shards computes new tensors from its operands alone.
    """
    arguments, returns = operator._schema.arguments, operator._schema.returns
    if any(argument.alias_info for argument in (*arguments, *returns)):
        return "writes into an operand, or returns a view of one"
    if any("List[" in str(a.type) and "Tensor" in str(a.type) for a in arguments):
        return "takes a list of tensors, and a rule has a fixed number of operands"
    if not tensor_arguments(operator):
        return "takes no tensor"
    if not returns or any(str(returned.type) != "Tensor" for returned in returns):
        return "returns something else than tensors, or nothing"
    if draws(operator):
        return "draws random numbers, and shards would get others than one device does"
    return None
