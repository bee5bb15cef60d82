"""Seams: layers. Their call, their outputs, the states of recurrences, a packed kernel."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import attrs
import torch

from shardcore.binding import seams
from shardcore.binding.session import Session, Sessions
from shardcore.domain.layout import Layout
from shardcore.ports.whereabouts import inside


def layer_call(
    sessions: Sessions, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """`Layer.__call__`: in it plain tensors mix with sharded ones, on every thread.

    Keras keeps the distribution by thread: one without it visits the strategy.
    """
    if not (sessions.are_open() or sessions.entry.serves_one_device):
        return original(layer, *args, **kwargs)
    strategy = sessions.visited()
    visit = nullcontext() if strategy is None else strategy.scope(visiting=True)
    with visit, inside(layer.path or layer.name):
        return original(layer, *args, **kwargs)


@attrs.frozen
class LayerEdges:
    """Stands in for the module `distribution_lib` and for the distribution in `Layer.__call__`.

    Every output passes here: one that a rule names is relaid; in all others pending sums are
    reduced, so that no later operator reduces them again.
    """

    sessions: Sessions

    def distribution(self) -> "LayerEdges | None":
        """Returns itself; None where nothing is distributed."""
        session = self.sessions.current()
        return None if session is None or seams.is_symbolic() else self

    def get_tensor_layout(self, path: str) -> str:
        """Returns `path`, that of an output, whose layout is looked up with the output itself."""
        return path

    def distribute_tensor(self, outputs: Any, path: str) -> Any:
        """Returns the outputs of a layer, each in its layout.

        Raises:
            LayoutError: If the rule for `path` does not fit one of them.
        """
        session = self.sessions.required()
        session.output_paths.add(path)
        ruled = session.distribution.get_tensor_layout(path)
        layout: Layout | None = None if ruled is None else ruled.backend_layout
        what = f"The output {path!r}"
        return seams.map_tensors(lambda each: lay_out(each, layout, what, session), outputs)


def lay_out(tensor: Any, layout: Layout | None, what: str, session: Session) -> Any:
    """Returns `tensor` in `layout`, or with its pending sums reduced where that is None."""
    if layout is not None:
        layout.fitting(tensor.shape, what)
    laid_out = session.strategy.activation(tensor, layout)
    if laid_out is not tensor:
        seams.copy_mask(tensor, laid_out)
    return laid_out


def initial_states(
    session: Session, original: Callable[..., Any], layer: Any, batch_size: Any
) -> Any:
    """`RNN.get_initial_state`: plain states are split over the batch axis, as the sequences are.

    A whole one, times a recurrent kernel that is split, would be split as the kernel is: that
    product would be moved, beside the kernel.
    """
    states = original(layer, batch_size)
    if seams.is_symbolic() or layer.stateful:  # a stateful layer makes variables of them
        return states
    return seams.map_tensors(lambda state: _split(state, session), states)


def _split(state: torch.Tensor, session: Session) -> Any:
    """The rows of a state that are this rank's; all of them where there are fewer than ranks."""
    ranks = session.mesh.axis_size(session.batch_axis)
    if session.strategy.owns(state) or state.requires_grad or not 1 < ranks <= len(state):
        return state
    return session.strategy.activation(state, session.batch_layout(state.ndim))


def int4_build(
    session: Session,
    original: Callable[..., None],
    layer: Any,
    kernel_shape: Any,
    config: Any = None,
) -> None:
    """`EinsumDense._int4_build`: a kernel of many dims becomes one of rows and packed columns.

    It is split as the rule for the kernel says.
    """
    path = f"{layer.path}/kernel"
    rule = session.distribution.get_tensor_layout(path)
    if rule is not None and len(rule.axes) == len(kernel_shape):
        layer._set_quantization_info()
        session.packed[path] = as_matrix(rule.backend_layout, layer._kernel_reduced_axes)
    try:
        original(layer, kernel_shape, config)
    finally:
        session.packed.pop(path, None)


def as_matrix(layout: Layout, reduced: Collection[int]) -> Layout:
    """The layout of a kernel whose `reduced` dims are joined to rows, the others to columns.

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
