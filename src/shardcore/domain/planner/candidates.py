"""Which factors of its rule a mesh axis may split in a call of an operator."""

from collections.abc import Iterator, Mapping
from math import prod

import attrs

from shardcore.domain.chunks import block_of, chunk_sizes
from shardcore.domain.placements import Blocks, Shard, stretches_of
from shardcore.domain.planner.call import Call, Cut, Placed
from shardcore.domain.rules.rule import Dim, Term


@attrs.frozen
class Candidates:
    """The factors that a mesh axis may split, each with the cut that it then has."""

    call: Call

    def of(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """The factors that `axis` may split, each with the cut that it then has."""
        seen = set()
        for factor, (count, grain) in self._split_by(axis):
            after = self._cut_by(axis, factor, cuts.get(factor, Cut(grain=grain, count=count)))
            if (factor, after) not in seen and self.call.leaves_none_empty(factor, after):
                seen.add((factor, after))
                yield factor, after

    def other_dims(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """The factors of the other dims, the last first, of the activations that `axis` splits.

        Of the weights where there is no activation.
        """
        only_weights = all(operand.weight for operand in self.call.operands)
        for term, operand in self.call.terms:
            is_split = isinstance(operand.layout.placement(axis), Shard)
            if not is_split or operand.weight != only_weights:
                continue
            for dim in reversed(term.dims[1:]):
                if dim.factor is not None:
                    after = self._cut_by(axis, dim.factor, cuts.get(dim.factor, Cut()))
                    if self.call.leaves_none_empty(dim.factor, after):
                        yield dim.factor, after

    def _cut_by(self, axis: str, factor: str, cut: Cut) -> Cut:
        """`cut` of `factor` with `axis` splitting it too."""
        return self._reordered(factor, Cut((*cut.axes, axis), cut.grain, cut.count))

    def _reordered(self, factor: str, cut: Cut) -> Cut:
        """`cut` with its axes in the order of an operand that they split so already."""
        for term, operand in self.call.terms:
            if factor in term.factors:
                split_by = operand.layout.dim_axes(term.dim_of(factor))
                axes = tuple(axis for axis in split_by if axis in cut.axes)
                other = Cut(axes, cut.grain, cut.count)
                if sorted(axes) == sorted(cut.axes) and self.call.leaves_none_empty(factor, other):
                    return other
        return cut

    def _split_by(self, axis: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """The factors that `axis` splits an operand by, with their stretches and grain."""
        found = [
            (operand.weight, *each)
            for term, operand in self.call.terms
            if (each := self._factor_of(term, operand, axis))
            and not (operand.weight and self._meets_its_like(axis, term, operand, each[0]))
        ]
        of_weights = {
            factor for term, operand in self.call.terms if operand.weight for factor in term.factors
        }
        stay = any(not weight and factor not in of_weights for weight, factor, _ in found)
        return ((factor, cut) for weight, factor, cut in found if not (stay and weight))

    def _meets_its_like(self, axis: str, term: Term, weight: Placed, factor: str) -> bool:
        """Whether a weight meets, element by element, an activation of its size that is not split.

        The result would have to be gathered later, which costs what gathering the weight does now.
        """
        return self.call.scales and any(
            not operand.weight
            and factor in other.factors
            and not isinstance(operand.layout.placement(axis), Shard)
            and prod(operand.shape) <= prod(weight.shape)
            for other, operand in self.call.terms
            if other is not term
        )

    def _factor_of(
        self, term: Term, operand: Placed, axis: str
    ) -> tuple[str, tuple[int, int]] | None:
        placement = operand.layout.placement(axis)
        if not isinstance(placement, Shard) or not operand.shape[placement.dim]:
            return None
        dim = term.dims[placement.dim]
        if dim.factor is None:
            return None
        ranks = self.call.sizes(operand.layout.dim_axes(placement.dim))
        return dim.factor, self._cut(dim, self.call.extents[dim.factor], placement.block, ranks)

    def _cut(self, dim: Dim, steps: int, blocks: Blocks, ranks: tuple[int, ...]) -> tuple[int, int]:
        """The stretches and the grain by which a factor is split where a dim is.

        Args:
            dim: The dim.
            steps: The steps of its factor.
            blocks: The blocks of the dim.
            ranks: The ranks along each axis that splits the dim.
        """
        count, block = stretches_of(blocks)
        left, rest = divmod(count, dim.count)
        if rest or steps % left:
            return 1, 1
        inner = steps // left
        wanted = chunk_sizes(inner * dim.block, ranks, block)
        if any(size % dim.block for size in wanted):
            return left, 1
        return left, block_of(inner, ranks, tuple(size // dim.block for size in wanted)) or 1
