"""The layouts of gradients, before they are reduced into that of their variable."""

from collections.abc import Sequence
from functools import lru_cache

from shardcore.domain.layout import Layout
from shardcore.domain.placements import Partial, Replicate
from shardcore.domain.spec import DimSpec, entry_axes


@lru_cache(maxsize=4096)
def as_target(layout: Layout, target: Layout) -> Layout:
    """Returns `target` with the partial sums of `layout`, or `layout` if they differ in more.

    Axes of one rank do not count.
    """
    mesh = layout.mesh
    single = [axis for axis in mesh.axis_names if mesh.axis_size(axis) == 1]
    if layout == target or layout.reduced.without(*single) != target.without(*single):
        return layout
    pending = tuple(partial for partial in layout.partial if partial[0] not in single)
    return Layout(mesh, target.spec, pending, target.blocks)


@lru_cache(maxsize=4096)
def sharded_like(layout: Layout, target: Layout) -> Layout:
    """Returns `layout` sharded like `target` by its replicated axes, to sum fewer bytes.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> gradient = Layout(mesh, (None, None), {"data": "sum"})
        >>> str(sharded_like(gradient, Layout(mesh, (None, "model"))))
        "(None, 'model') with sum over 'data'"
    """
    pending = [axis for axis, _ in layout.partial]
    if layout.blocks != target.blocks or not layout.reduced.is_replicated:
        return layout
    if any(_is_nested(entry, pending) for entry in target.spec):
        return layout
    return Layout(layout.mesh, target.without(*pending).spec, layout.partial)


def _is_nested(entry: DimSpec, pending: Sequence[str]) -> bool:
    """Returns whether a pending axis shards a dim that another axis shards further."""
    last = [axis in pending for axis in entry_axes(entry)]
    return last != sorted(last)


def is_reduced_at_output(output: Layout) -> bool:
    """Returns whether the gradient of an output in this layout is reduced at the layer's output.

    An output without rows of the batch depends on variables only, whose gradients are reduced in
    buckets. The gradient of a partial maximum cannot be a partial sum.
    """
    chosen = any(op != "sum" for _, op in output.partial)
    return chosen or not output.reduced.is_replicated


def layout_at_output(gradient: Layout, output: Layout) -> Layout:
    """Returns `output`, reduced, if `gradient` shards only what it shards; else `gradient` reduced.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> output = Layout(mesh, ("data", None))
        >>> str(layout_at_output(Layout(mesh, (None, None), {"model": "sum"}), output))
        "('data', None)"
        >>> str(layout_at_output(Layout(mesh, ("data", "model")), output))
        "('data', 'model')"
    """
    fits = all(
        isinstance(gradient.placement(axis), Partial | Replicate)
        or gradient.placement(axis) == output.placement(axis)
        for axis in gradient.mesh.axis_names
    )
    return output.reduced if fits else gradient.reduced
