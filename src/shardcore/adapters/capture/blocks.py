"""Pointwise work on large tensors that goes block by block, so that blocks stay in the cache."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.tape import Form


@attrs.frozen
class BlockSize:
    """How large blocks are.

    torch 2.13 computes so many elements at once, and what remains at the end one by one: with other
    last bits for `pow`, `sigmoid` and their kind.

    Args:
        elements: Those of a block, at most.
        lanes: Those that torch computes at once, or a multiple. Only the last block ends amid them.
    """

    elements: int
    lanes: int

    def rows(self, row: int) -> int:
        """How many rows of so many elements a block has; 0 if it can have none.

        Example:
            >>> BlockSize(1000, 32).rows(100), BlockSize(1000, 1).rows(100)
            (8, 10)
        """
        together = self.lanes // math.gcd(row, self.lanes)
        return self.elements // max(row, 1) // together * together


@attrs.frozen
class Cut:
    """How tensors of one shape are cut into blocks.

    Args:
        shape: That shape.
        dims: How many dims, the first ones, are seen as one: that of rows.
        rows: How many rows a block has.
    """

    shape: tuple[int, ...]
    dims: int
    rows: int

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        forms: Iterable[Form],
        rounded: Iterable[Form],
        size: BlockSize,
    ) -> "Cut | None":
        """That into blocks of a size; None if a tensor cannot be cut so.

        Args:
            shape: That of what is computed.
            forms: What takes part; a form of another shape is broadcast to `shape`.
            rounded: The results among them that have other bits where a loop of torch ends, which
                goes along them as they lie.
            size: That of a block.
        """
        forms, rounded = list(forms), list(rounded)
        for dims in range(1, len(shape) + 1):
            row = math.prod(shape[dims:])
            cut = cls(shape, dims, size.rows(row))
            fits = all(cut.is_split(each) or cut.is_whole(each) for each in forms)
            if cut.rows and fits and all(cut.is_in_rows(each) for each in rounded):
                return cut
        return None

    def is_in_rows(self, form: Form) -> bool:
        """Whether a block of a tensor is one piece of its memory, or pieces of whole rows."""
        return form.strides[self.dims - 1] >= max(form.strides[self.dims :], default=0)

    def is_split(self, form: Form) -> bool:
        """Whether a tensor has all rows, and can be seen so without a copy."""
        steps = zip(form.strides, form.strides[1:], form.shape[1:], strict=False)
        return (
            len(form.shape) == len(self.shape)
            and form.shape[: self.dims] == self.shape[: self.dims]
            and all(a == b * size for a, b, size in itertools.islice(steps, self.dims - 1))
        )

    def is_whole(self, form: Form) -> bool:
        """Whether every block gets the whole tensor: it has no rows, or one for all of them."""
        return all(size == 1 for size in form.shape[: self.dims_of_rows(len(form.shape))])

    def dims_of_rows(self, dims: int) -> int:
        """How many of the first dims of a tensor that is broadcast are those of rows."""
        return max(dims - (len(self.shape) - self.dims), 0)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return math.ceil(math.prod(self.shape[: self.dims]) / self.rows)


def blockwise(
    body: Callable[..., Any], cut: Cut, operands: Sequence[Form], made: Sequence[Form]
) -> Callable[..., list[torch.Tensor]]:
    """A function that does `body` block by block, and returns a list of results.

    Args:
        body: Takes blocks of tensors, and tensors that are whole, and then blocks to write results
            into.
        cut: How they are cut.
        operands: Those of `body` but the results.
        made: The results.
    """
    forms = [*operands, *made]
    is_split = [*map(cut.is_split, operands), *(True for _ in made)]
    dims = [
        cut.dims if split else cut.dims_of_rows(len(form.shape))
        for split, form in zip(is_split, forms, strict=True)
    ]

    def in_blocks(*given: torch.Tensor) -> list[torch.Tensor]:
        results = [
            torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=each.device)
            for each in made
        ]
        parts: list[Any] = []
        for tensor, first, split in zip((*given, *results), dims, is_split, strict=True):
            seen = tensor.flatten(0, first - 1) if first > 1 else tensor
            parts.append(torch.split(seen, cut.rows) if split else [seen] * cut.blocks)
        for blocks in zip(*parts, strict=True):
            body(*blocks)
        return results

    return in_blocks
