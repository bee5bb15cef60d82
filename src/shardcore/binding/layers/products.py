"""Patches: products of a sequence whose rows and tokens are both split, or of all experts.

torch flattens (rows, tokens, channels) to a matrix of lines. If one axis splits rows and another
tokens, a rank has some tokens of some rows: no layout describes the matrix, and it would be
all-gathered. But a product computes each line separately, in any order. So each rank multiplies the
lines that it has, and the order of lines is that of ranks.

torch makes one matrix of the kernels of all experts for `td,edh->eth`. If an axis splits tokens and
experts, that matrix would be all-gathered, as any weight. A product for each expert, with equal
tokens, lets the planner gather the tokens instead.
"""

from math import prod
from typing import Any

import attrs
import torch

from shardcore.binding.context.session import Session
from shardcore.binding.types import Original
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Shard
from shardcore.ports.types import Array


def matmul(session: Session, original: Original, x1: Array, x2: Array) -> Any:
    """Replaces `matmul`, of several dims and a matrix."""
    if getattr(x2, "ndim", 0) == 2:
        lines = _Lines.of(x1, getattr(x1, "ndim", 0) - 1, session)
        if lines is not None:
            return lines.restored(original(lines.joined(), x2))
    return original(x1, x2)


def einsum(
    session: Session, original: Original, subscripts: str, *operands: Array, **kwargs: object
) -> Any:
    """Replaces `einsum`, of two operands; the second lacks the first dims of the first."""
    if len(operands) == 2 and _makes_experts(subscripts):
        subscripts, tokens = _for_each_expert(subscripts, *operands, session)
        operands = (tokens, operands[1])
    kept = _kept(subscripts) if len(operands) == 2 else ""
    lines = _Lines.of(operands[0], len(kept), session) if kept else None
    if lines is None:
        return original(subscripts, *operands, **kwargs)
    of_lines = subscripts.replace(" ", "").replace(kept, kept[0])
    return lines.restored(original(of_lines, lines.joined(), operands[1], **kwargs))


def _makes_experts(subscripts: str) -> bool:
    """Returns whether the first dim of the second operand is new, and the first of the result.

    Example:
        >>> _makes_experts("td,edh->eth"), _makes_experts("etd,edh->eth")
        (True, False)
    """
    given, _, result = subscripts.replace(" ", "").partition("->")
    first, _, second = given.partition(",")
    expert = second[:1]
    return expert.isalpha() and expert not in first and expert == result[:1]


def _for_each_expert(
    subscripts: str, tokens: Any, kernel: Any, session: Session
) -> tuple[str, Any]:
    """Returns subscripts and tokens with a dim for experts, if an axis splits tokens and experts.

    The tokens of all experts are one tensor in memory.
    """
    given = tokens, getattr(kernel, "value", kernel)
    if not all(isinstance(each, torch.Tensor) for each in given):
        return subscripts, tokens
    of_tokens, of_kernel = map(session.strategy.layout, given)
    if of_tokens is None or of_kernel is None:
        return subscripts, tokens
    if not any(isinstance(of_tokens.placement(axis), Shard) for axis in of_kernel.dim_axes(0)):
        return subscripts, tokens
    joined = subscripts.replace(" ", "")
    expert = joined.partition(",")[2][0]
    return expert + joined, tokens.expand(kernel.shape[0], *tokens.shape)


def _kept(subscripts: str) -> str:
    """Returns the first dims of the first operand and of the result, if the other has none of them.

    Example:
        >>> _kept("abc,cde->abde"), _kept("abc,bcd->abd"), _kept("aecd,abcd->acbe")
        ('ab', 'a', '')
    """
    given, _, result = subscripts.replace(" ", "").partition("->")
    first, _, second = given.partition(",")
    found = ""
    for letter, other in zip(first, result, strict=False):
        if letter != other or letter in second or not letter.isalpha():
            break
        found += letter
    return found


@attrs.frozen
class _Lines:
    """The lines of a tensor: its first dims, flattened.

    Args:
        tensor: The tensor.
        layout: Its layout.
        count: The number of the first dims.
        session: The session.
    """

    tensor: torch.Tensor
    layout: Layout
    count: int
    session: Session

    @classmethod
    def of(cls, tensor: Any, count: int, session: Session) -> "_Lines | None":
        """Returns the lines of a tensor; None if fewer than two of its first dims are split."""
        if count < 2 or not isinstance(tensor, torch.Tensor):
            return None
        layout = session.strategy.layout(tensor)
        if layout is None or layout.partial:
            return None
        split = [dim for dim in range(count) if prod(layout.ranks(dim)) > 1]
        return cls(tensor, layout, count, session) if len(split) > 1 else None

    def joined(self) -> Any:
        """Returns a tensor of all lines, in the order of ranks; ranks with fewer add zeros."""
        part = self.session.strategy.local(self.tensor).flatten(0, self.count - 1)
        missing = self._most - len(part)
        if missing:
            part = torch.nn.functional.pad(part, (0, 0) * (part.ndim - 1) + (0, missing))
        lines = self._most * prod(map(self.layout.mesh.axis_size, self._axes))
        shape = (lines, *self.tensor.shape[self.count :])
        spec = (self._axes, *self.layout.spec[self.count :])
        blocks = (1, *self.layout.blocks[self.count :])
        return self.session.strategy.join(part, Layout(self.layout.mesh, spec, (), blocks), shape)

    def restored(self, product: Any) -> Any:
        """Returns `product`, with the lines of `joined`, with the first dims as they were."""
        made = self.session.strategy.layout(product)
        assert made is not None, "a product of sharded lines"
        found = self._by_lines(made)
        if found != made:
            product = self.session.strategy.activation(product, found)
        sizes = self.layout.local_shape(self.tensor.shape, self.session.world.position)
        part = self.session.strategy.local(product)[: prod(sizes[: self.count])]
        part = part.reshape(*sizes[: self.count], *part.shape[1:])
        first, rest = slice(self.count), slice(1, None)
        layout = Layout(
            found.mesh,
            (*self.layout.spec[first], *found.spec[rest]),
            found.partial,
            (*self.layout.blocks[first], *found.blocks[rest]),
        )
        shape = (*self.tensor.shape[first], *product.shape[rest])
        return self.session.strategy.join(part, layout, shape)

    def _by_lines(self, made: Layout) -> Layout:
        """Returns the layout `made` of a product with the lines split as those of `joined`."""
        rest = made.without(*self._axes)
        partial = [(axis, op) for axis, op in made.partial if axis not in self._axes]
        spec, blocks = (self._axes, *rest.spec[1:]), (1, *rest.blocks[1:])
        return Layout(made.mesh, spec, tuple(partial), blocks)

    @property
    def _axes(self) -> tuple[str, ...]:
        """The axes that split the first dims."""
        return tuple(axis for dim in range(self.count) for axis in self.layout.dim_axes(dim))

    @property
    def _most(self) -> int:
        """The number of lines of the first rank, which has most."""
        return prod(self.layout.local_shape(self.tensor.shape, rank=0)[: self.count])
