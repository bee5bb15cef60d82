"""Seam: `EinsumDense` packs its int4 kernel as a matrix. It is split as the kernel's rule says."""

from collections.abc import Callable, Collection
from typing import Any

from shardcore.binding.session import Sessions
from shardcore.domain.layout import Layout


def int4_build(original: Callable[..., None], sessions: Sessions) -> Callable[..., None]:
    """`EinsumDense._int4_build`: a kernel of many dims becomes one of rows and packed columns."""

    def _int4_build(layer: Any, kernel_shape: Any, config: Any = None) -> None:
        session = sessions.current()
        if session is None:
            original(layer, kernel_shape, config)
            return
        path = f"{layer.path}/kernel"
        rule = session.distribution.get_tensor_layout(path)
        if rule is not None and len(rule.axes) == len(kernel_shape):
            layer._set_quantization_info()
            session.packed[path] = as_matrix(rule.backend_layout, layer._kernel_reduced_axes)
        try:
            original(layer, kernel_shape, config)
        finally:
            session.packed.pop(path, None)

    return _int4_build


def as_matrix(layout: Layout, reduced: Collection[int]) -> Layout:
    """The layout of a kernel whose reduced dims are joined to rows, the others to columns.

    Args:
        layout: The layout of the kernel.
        reduced: The dims that are summed over with the input.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> heads = Layout(Mesh((2, 2), ("data", "model")), ("model", "data", None))
        >>> as_matrix(heads, reduced=(0, 1)).spec, as_matrix(heads, reduced=(0,)).spec
        ((('data', 'model'), None), ('model', 'data'))
    """
    axes: dict[bool, list[str]] = {True: [], False: []}
    for axis in layout.mesh.axis_names:
        for dim in range(layout.ndim):
            if axis in layout.dim_axes(dim):
                axes[dim in reduced].append(axis)
    return Layout(layout.mesh, (axes[True], axes[False]))
