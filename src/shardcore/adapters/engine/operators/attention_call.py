"""A call of an attention of torch, or of its gradient, which runs on parts of its operands.

torch has one such operator for the CPU and three for CUDA. Their arguments have other orders, and
their sums other forms; all have the same names.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs
import torch

from shardcore.adapters.engine.task import Operand, Operator
from shardcore.adapters.torch_private import Args, Kwargs, arguments_of, unnamed_operators

# torch 2.13: the efficient operators read rows of masks, and sums, in blocks of as many elements.
_MASK_BLOCK, _SUMS_BLOCK = 16, 32
_EFFICIENT = {
    unnamed_operators.EFFICIENT_ATTENTION,
    unnamed_operators.EFFICIENT_ATTENTION_BACKWARD,
}
# torch 2.11, on an H200: they take powers of 2, for which a mask of this number is infinite.
_LEAST_POWER = torch.finfo(torch.float32).min / math.log2(math.e)


@attrs.frozen(eq=False)
class AttentionCall:
    """A call of an operator of attention, without dropout.

    Args:
        operator: The operator.
        arguments: Its arguments by name, with an `Operand` in the place of each tensor.
    """

    operator: Operator
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, operator: Operator, args: Args, kwargs: Kwargs) -> Self:
        """Names the arguments, and adds those with default values."""
        return cls(operator, arguments_of(operator, args, kwargs))

    @property
    def inputs(self) -> tuple[Operand, Operand, Operand]:
        """Query, key and value."""
        return self.arguments["query"], self.arguments["key"], self.arguments["value"]

    @property
    def gradient(self) -> Operand:
        """The gradient of the output, in the call of a gradient."""
        name = "grad_out" if "grad_out" in self.arguments else "grad_out_"
        return self.arguments[name]  # type: ignore[no-any-return]

    @property
    def results(self) -> tuple[Operand, Operand]:
        """The output and its sums, in the call of a gradient."""
        return self.arguments["out"], self.arguments["logsumexp"]

    @property
    def causal(self) -> bool:
        """Whether a query attends only to keys up to its own position."""
        return bool(self.arguments["is_causal"])

    @property
    def can_be_sharded(self) -> bool:
        """Whether parts of it can be computed: not with dropout, or if its mask is returned."""
        dropped = self.arguments["dropout_p"] or self.arguments.get("return_debug_mask")
        return not dropped

    @property
    def mask_name(self) -> str:
        """The name of the mask among the arguments."""
        return "attn_bias" if "attn_bias" in self.arguments else "attn_mask"

    @property
    def mask(self) -> Operand | None:
        """The mask, which is added to the scores; None without one."""
        return self.arguments.get(self.mask_name)

    def attends_to_no_key(self, mask: torch.Tensor) -> torch.Tensor:
        """Finds the rows of `mask` whose query attends to no key: its sum is 0 then.

        Where all keys have another large negative number, it attends to all of them alike.
        """
        least = _LEAST_POWER if self.operator in _EFFICIENT else -math.inf
        return mask.amax(-1).float() <= least

    @property
    def states(self) -> Mapping[str, Operand]:
        """The states of the random generator, by name: a gradient with dropout reads them."""
        names = ("philox_seed", "philox_offset")
        states = {name: self.arguments.get(name) for name in names}
        return {name: state for name, state in states.items() if state is not None}

    @property
    def trains_mask(self) -> bool:
        """Whether the gradient of the mask is asked for."""
        return self.mask is not None and self.arguments.get("grad_input_mask", [False])[-1]

    def output(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool,
    ) -> tuple[Any, ...]:
        """Computes the output, its sums as (batch, heads, length), and torch's other results."""
        inputs = {"query": query, "key": key, "value": value}
        output, sums, *others = self._run(inputs, mask, causal)
        if sums.shape != query.shape[:3]:
            sums = sums.reshape(*query.shape[:2], -1)[:, :, : query.shape[2]]
        return output, sums, *others

    def gradients(
        self,
        operands: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        states: Sequence[torch.Tensor],
        *,
        causal: bool,
    ) -> Sequence[Any]:
        """Computes the gradients of query, key, value and mask; None for a mask without one.

        The operands are the gradient of the output, query, key, value, output and sums.
        """
        gradient, query, key, value, output, sums = operands
        tensors = {
            **{"grad_out": gradient, "grad_out_": gradient},
            **{"query": query, "key": key, "value": value},
            **{"out": output, "logsumexp": self._given(sums)},
            **dict(zip(self.states, states, strict=True)),
        }
        return self._run(tensors, mask, causal)  # type: ignore[no-any-return]

    def _run(
        self, tensors: Mapping[str, torch.Tensor], mask: torch.Tensor | None, causal: bool
    ) -> Any:
        here: dict[str, Any] = {
            **tensors,
            **{"is_causal": causal, "compute_log_sumexp": True},
            **{"max_q": tensors["query"].shape[2], "max_k": tensors["key"].shape[2]},
        }
        if mask is not None:
            here[self.mask_name] = _in_blocks(mask) if self.operator in _EFFICIENT else mask
        return self.operator(
            **{name: here.get(name, value) for name, value in self.arguments.items()}
        )

    def _given(self, sums: torch.Tensor) -> torch.Tensor:
        """Converts `sums`, of (batch, heads, length), to the form that the gradient takes."""
        if self.operator is unnamed_operators.CUDNN_ATTENTION_BACKWARD:
            return sums.unsqueeze(-1)
        if self.operator not in _EFFICIENT:
            return sums
        missing = -sums.shape[2] % _SUMS_BLOCK
        return torch.nn.functional.pad(sums, (0, missing), value=torch.inf)


def _in_blocks(mask: torch.Tensor) -> torch.Tensor:
    """Pads `mask` so that its rows begin at multiples of a block, as the operator takes them."""
    *outer, inner = mask.stride()
    starts = (mask.storage_offset(), *outer)
    if inner == 1 and not any(start % _MASK_BLOCK for start in starts):
        return mask
    columns = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, -columns % _MASK_BLOCK))[..., :columns]
