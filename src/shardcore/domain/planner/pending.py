"""Reductions of operands that an operator need not do: they stay pending in its results."""

from collections.abc import Iterable, Sequence

from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.placements import Replicate


def pending_in_results(
    operands: Sequence[Layout], linear_in: Sequence[int], adds: Sequence[int]
) -> PartialAxes:
    """Returns the reductions of operands that stay pending in the results.

    Args:
        operands: The layouts of the operands.
        linear_in: The operands, by number, in each of which the operator is linear.
        adds: The operands, by number, that it adds, or chooses from.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> full = Layout(Mesh((2,), ("data",)), (None,))
        >>> sums, means = (Layout(full.mesh, (None,), {"data": op}) for op in ("sum", "avg"))
        >>> pending_in_results([sums, full], linear_in=[0], adds=[])
        (('data', 'sum'),)
        >>> pending_in_results([full, sums], linear_in=[], adds=[0, 1])
        (('data', 'sum'),)
        >>> pending_in_results([full, means], linear_in=[], adds=[0, 1])
        ()
    """
    numbers = [number for number, layout in enumerate(operands) if layout.partial]
    kinds = {operands[number].partial for number in numbers}
    if len(kinds) != 1:
        return ()
    (pending,) = kinds
    ops = {op for _, op in pending}
    if not ops <= {"sum", "avg"}:
        return ()
    if len(numbers) == 1 and numbers[0] in linear_in:
        return pending
    if not adds or not set(numbers) <= set(adds):
        return ()
    # The first rank adds operands that are not partial: to a sum, and not to a mean.
    return pending if ops == {"sum"} or len(numbers) == len(adds) else ()


def are_free(layouts: Iterable[Layout], pending: PartialAxes) -> bool:
    """Returns whether no layout uses an axis of `pending`."""
    placements = (layout.placement(axis) for layout in layouts for axis, _ in pending)
    return all(isinstance(placement, Replicate) for placement in placements)
