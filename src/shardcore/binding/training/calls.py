"""Patches: the call and the outputs of layers, initial states of RNNs, the packed int4 kernel."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from keras import Layer
from keras.layers import RNN, EinsumDense

from shardcore.binding import keras_private
from shardcore.binding.data import batches
from shardcore.binding.engine.adoption import adopt
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.training import loops
from shardcore.binding.types import Original
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.measurement import layer_scope


@replaces(
    "keras.src.layers.layer:Layer.__call__",
    reason="Plain tensors mix with sharded ones in it on threads that have no distribution.",
)
def layer_call(
    sessions: Sessions, original: Original, layer: Layer, *args: object, **kwargs: object
) -> Any:
    """Replaces `Layer.__call__`, in which plain tensors mix with sharded ones, on every thread.

    Keras has one distribution per thread: a thread without one uses the strategy
    without collectives.
    """
    if not (sessions.are_open() or sessions.entry.serves_one_device):
        return original(layer, *args, **kwargs)
    session = None if layer_scope.now() else sessions.current()
    if session is not None:
        if layer not in session.adopted:
            session.adopted.add(layer)
            adopt(layer, session)
        if keras_private.is_symbolic_with_values():  # Keras gives each rank the global batch
            args, kwargs = batches.take_own_rows((args, kwargs), session)
        elif loops.is_in_loop(session):
            return _call_in_loop(session, original, layer, (args, kwargs))
    strategy = sessions.strategy_without_distribution()
    replication = (
        nullcontext()
        if strategy is None
        else strategy.implicit_replication(forbid_collectives=True)
    )
    with replication, layer_scope(layer.path or layer.name):
        return original(layer, *args, **kwargs)


def _call_in_loop(session: Session, original: Original, layer: Layer, call: loops.Call) -> Any:
    args, kwargs = loops.join_rows(layer, call, session)
    with layer_scope(layer.path or layer.name):
        outputs = original(layer, *args, **kwargs)
    loops.note_inputs(layer, (args, kwargs), outputs, session)
    return outputs


@replaces_value(
    "keras.src.layers.layer:distribution_lib",
    reason="Layer.__call__ lays out the output of a layer by it.",
)
def layer_edges(sessions: Sessions, _original: object) -> "LayerEdges":
    """Replaces the module `distribution_lib` in `Layer.__call__`."""
    return LayerEdges(sessions)


@attrs.frozen
class LayerEdges:
    """Replaces the module `distribution_lib` and the distribution in `Layer.__call__`.

    Every output passes here. One that a rule names is redistributed. Any other is reduced, so that
    no later operator reduces it again; a sum over the batch axes to each rank's rows.
    """

    sessions: Sessions

    def distribution(self) -> "LayerEdges | None":
        """Stands for a distribution in `Layer.__call__`; None if nothing is distributed."""
        session = self.sessions.current()
        return None if session is None or keras_private.is_symbolic() else self

    def get_tensor_layout(self, path: str) -> str:
        """Puts off the look-up of a layout until the output is there: gives `path` back."""
        return path

    def distribute_tensor(self, outputs: object, path: str) -> Any:
        """Redistributes the outputs of a layer, each into its layout."""
        session = self.sessions.required()
        layout = _layout_by_rule(path, session)
        what = f"The output {path!r}"
        return keras_private.map_tensors(
            lambda tensor: lay_out(tensor, layout or _rows(tensor, session), what, session), outputs
        )


def _rows(output: torch.Tensor, session: Session) -> Layout | None:
    """Lays out a sum over the batch axes so that each rank gets its rows; None for other tensors.

    Experts that are sharded over these axes give such sums of all rows. If each rank got all rows,
    the layers behind would compute them on each rank.
    """
    layout, axes = session.strategy.layout(output), session.batch_axes
    if layout is None or layout.ndim < 2 or not 1 < session.batch_shards <= len(output):
        return None
    sums = [axis for axis in axes if (axis, "sum") in layout.partial]
    if not sums or (*layout.dim_axes(0), *sums) != axes:
        return None
    return Layout(layout.mesh, (axes, *layout.spec[1:]), (), (1, *layout.blocks[1:]))


def _layout_by_rule(path: str, session: Session) -> Layout | None:
    """Looks up the rule of the output `path`, and notes that there is such an output."""
    session.output_paths.add(path)
    ruled = session.distribution.get_tensor_layout(path)
    return None if ruled is None else ruled.backend_layout


@replaces(
    "keras.src.models.functional:Functional._standardize_inputs",
    reason="An input is no call of a layer, so that a rule for its output would not be read.",
)
def model_inputs(session: Session, original: Original, model: object, inputs: object) -> list[Any]:
    """Replaces `Functional._standardize_inputs`: inputs with a rule for their output get it."""
    standardized: list[Any] = original(model, inputs)
    if keras_private.is_symbolic():
        return standardized
    paths = [f"{name}/output" for name in keras_private.input_names(model)]
    layouts = [_layout_by_rule(path, session) for path in paths]
    return [
        tensor
        if layout is None or tensor is None
        else lay_out(tensor, layout, f"Input {path!r}", session)
        for tensor, layout, path in zip(standardized, layouts, paths, strict=True)
    ]


def lay_out(tensor: torch.Tensor, layout: Layout | None, what: str, session: Session) -> Any:
    """Redistributes `tensor` into `layout`, or only reduces it if that is None (ADR 4)."""
    if layout is not None:
        layout.fitting(tensor.shape, what)
    laid_out = session.strategy.redistribute(tensor, layout)
    if laid_out is not tensor:
        keras_private.copy_mask(tensor, laid_out)
    return laid_out


@replaces(
    "keras.src.layers.rnn.rnn:RNN.get_initial_state",
    reason="Replicated, while the rows of the sequences are sharded.",
)
def initial_states(session: Session, original: Original, layer: RNN, batch_size: int | None) -> Any:
    """Replaces `RNN.get_initial_state`: shards plain states over the batch axis, as sequences are.

    The product of a replicated state and a sharded recurrent kernel would be sharded like the
    kernel, and would be redistributed, as well as the kernel.
    """
    states = original(layer, batch_size)
    if keras_private.is_symbolic() or layer.stateful:  # which creates variables from them
        return states
    return keras_private.map_tensors(lambda state: _sharded(state, session), states)


def _sharded(state: torch.Tensor, session: Session) -> Any:
    """Shards the rows of a plain state, unless there are fewer than ranks."""
    parts = session.batch_shards
    if session.strategy.owns(state) or state.requires_grad or not 1 < parts <= len(state):
        return state
    return session.strategy.redistribute(state, session.batch_layout(state.ndim))


@replaces(
    "keras.src.layers.core.einsum_dense:EinsumDense.quantized_build",
    reason="Its int4 kernel has other dims than the kernel that a rule was written for.",
)
def quantized_build(
    session: Session,
    original: Original,
    layer: EinsumDense,
    kernel_shape: Sequence[int],
    mode: str,
    config: object = None,
) -> None:
    """Replaces `EinsumDense.quantized_build`, which packs an int4 kernel into a matrix.

    The kernel has many dims. The matrix is sharded as the rule for the kernel says.
    """
    path = f"{layer.path}/kernel"
    rule = session.distribution.get_tensor_layout(path) if mode == "int4" else None
    if rule is not None and len(rule.axes) == len(kernel_shape):
        session.packed[path] = as_matrix(rule.backend_layout, keras_private.matrix_axes(layer))
    try:
        original(layer, kernel_shape, mode, config)
    finally:
        session.packed.pop(path, None)


def as_matrix(layout: Layout, reduced: Collection[int]) -> Layout:
    """Derives the layout of a kernel whose `reduced` dims become rows, the others columns.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
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
