"""Pointwise work on large tensors that goes block by block, so that blocks stay in the cache."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.tape import Form


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
    def of(cls, shape: tuple[int, ...], forms: Iterable[Form], block: int) -> "Cut | None":
        """That into blocks of at most `block` elements; None if a tensor cannot be cut so.

        Args:
            shape: That of what is computed.
            forms: What takes part; a form of another shape is broadcast to `shape`.
            block: The elements of a block.
        """
        forms = list(forms)
        for dims in range(1, len(shape) + 1):
            row = math.prod(shape[dims:])
            cut = cls(shape, dims, block // max(row, 1))
            if cut.rows and all(cut.is_split(each) or cut.is_whole(each) for each in forms):
                return cut
        return None

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
        return all(size == 1 for size in form.shape[: self._dims_of_rows(len(form.shape))])

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is whole, with as many dims as a block or fewer."""
        dims = self._dims_of_rows(tensor.ndim)
        return tensor.flatten(0, dims - 1) if dims > 1 else tensor

    def _dims_of_rows(self, dims: int) -> int:
        """How many of the dims of a tensor that is broadcast are those of rows."""
        return max(dims - (len(self.shape) - self.dims), 0)

    def parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The blocks of a tensor that is split, as views."""
        rows = tensor.flatten(0, self.dims - 1) if self.dims > 1 else tensor
        return torch.split(rows, self.rows)


def blockwise(
    body: Callable[..., tuple[torch.Tensor, ...]],
    cut: Cut,
    split: Sequence[bool],
    made: Sequence[Form],
) -> Callable[..., list[torch.Tensor]]:
    """A function that does `body` block by block.

    Args:
        body: Takes blocks of tensors, and tensors that are whole, and then blocks to write results
            into; gives blocks of results, these or others.
        cut: How they are cut.
        split: Which operands of `body` are blocks.
        made: The results.
    """

    def in_blocks(*operands: Any) -> list[torch.Tensor]:
        results = [
            torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device=each.device)
            for each in made
        ]
        blocks = (
            cut.parts(each) if is_split else itertools.repeat(cut.whole(each))
            for each, is_split in zip(operands, split, strict=True)
        )
        targets = zip(*map(cut.parts, results), strict=True) if made else itertools.repeat(())
        for target, block in zip(targets, zip(*blocks, strict=False), strict=False):
            for into, value in zip(target, body(*block, *target), strict=True):
                if value is not into:
                    into.copy_(value)
        return results

    return in_blocks
