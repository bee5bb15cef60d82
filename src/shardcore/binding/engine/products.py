"""Patches: products of tokens with the kernels of all experts.

torch makes one matrix of the kernels of all experts for `td,edh->eth`. If an axis shards tokens and
experts, that matrix would be all-gathered, as any weight. A product for each expert, with equal
tokens, lets the planner all-gather the tokens instead.
"""

from typing import Any

import torch

from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session
from shardcore.binding.types import Original
from shardcore.domain.layouts.placements import Shard
from shardcore.ports.types import Array


@replaces(
    "keras.src.backend.torch.numpy:einsum",
    reason="Makes one matrix of the kernels of all experts, which would be all-gathered.",
)
def einsum(
    session: Session, original: Original, subscripts: str, *operands: Array, **kwargs: object
) -> Any:
    """Replaces `einsum` of tokens and kernels of experts."""
    if len(operands) == 2 and _makes_experts(subscripts):
        subscripts, tokens = _for_each_expert(subscripts, *operands, session)
        operands = (tokens, operands[1])
    return original(subscripts, *operands, **kwargs)


def _makes_experts(subscripts: str) -> bool:
    """Returns whether the first dim of the second operand is new, and the first of the result.

    Example:
        >>> _makes_experts("td,edh->eth"), _makes_experts("etd,edh->eth")
        (True, False)
    """
    operands, _, result = subscripts.replace(" ", "").partition("->")
    first, _, second = operands.partition(",")
    expert = second[:1]
    return expert.isalpha() and expert not in first and expert == result[:1]


def _for_each_expert(
    subscripts: str, tokens: Any, kernel: Any, session: Session
) -> tuple[str, Any]:
    """Returns subscripts and tokens with a dim for experts, if an axis shards tokens and experts.

    The tokens of all experts are one tensor in memory.
    """
    operands = tokens, getattr(kernel, "value", kernel)
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        return subscripts, tokens
    of_tokens, of_kernel = map(session.strategy.layout, operands)
    if of_tokens is None or of_kernel is None:
        return subscripts, tokens
    if not any(isinstance(of_tokens.placement(axis), Shard) for axis in of_kernel.dim_axes(0)):
        return subscripts, tokens
    joined = subscripts.replace(" ", "")
    expert = joined.partition(",")[2][0]
    return expert + joined, tokens.expand(kernel.shape[0], *tokens.shape)
