"""A call of an operator with a declared rule on NumPy arrays, to prove the rule."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.adapters.engine.declared.rules import DeclaredCall, find
from shardcore.adapters.torch_private import Args, Kwargs
from shardcore.adapters.torch_private.signatures import is_operator
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.errors import ArgumentProblem

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class ArrayCall:
    """A call on plain tensors: its rule, its operands as arrays, and how it runs on others."""

    call: DeclaredCall

    @classmethod
    def of(cls, operator: object, args: Args, kwargs: Kwargs) -> "ArrayCall":
        """Reads the operands of a call.

        Raises:
            ArgumentProblem: If `operator` has no declared rule.
        """
        if not is_operator(operator) or find(operator) is None:
            raise ArgumentProblem(
                name="check_operator_rule(operator)",
                expected="an operator with a declared rule",
                got=str(operator),
                remedy="declare it first, by shardcore.operator_rule(operator, rule)",
            )
        return cls(DeclaredCall.of(operator, args, kwargs))

    @property
    def rule(self) -> OperatorRule:
        """The rule of the call."""
        return self.call.rule

    @property
    def operands(self) -> list[Array]:
        """The values of the operands."""
        return [_array(tensor) for tensor in self.call.operands.values()]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs the operator on other values, of the dtypes and on the devices of its operands."""
        examples = self.call.operands.values()
        tensors = [
            torch.from_numpy(np.array(array)).to(example.device, example.dtype)
            for array, example in zip(arrays, examples, strict=True)
        ]
        with torch.no_grad():
            return [_array(result) for result in self.call.run(tensors)]

    @property
    def tolerance(self) -> float:
        """Allows for sums in another order, relative to the largest number."""
        dtypes = [tensor.dtype for tensor in self.call.operands.values()]
        return max((sqrt(torch.finfo(d).eps) for d in dtypes if d.is_floating_point), default=0.0)


def _array(tensor: torch.Tensor) -> Array:
    """Copies a tensor, in a dtype of NumPy."""
    value = tensor.detach().cpu()
    if value.dtype is torch.bool:
        value = value.to(torch.uint8)
    elif value.is_floating_point() and value.dtype.itemsize < 4:
        value = value.float()
    return value.numpy().copy()
