"""For those who work below Keras: variables, tensors and collectives by name of the mesh axis."""

from typing import Any

import keras
import torch

from shardcore.binding import batches, torch_modules
from shardcore.binding.session import Session, Sessions
from shardcore.binding.variable import place, strategy_of
from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.domain.placements import ReduceOp


def distribute_variable(variable: Any, layout: Any, sessions: Sessions) -> Any:
    """Lay `variable` out anew. Every rank takes rank 0's value."""
    session = sessions.required()
    value = all_gather_variable(variable, sessions)
    value = torch.as_tensor(session.processes.gather(value.cpu())[0], device=value.device)
    before = variable._value
    variable._layout = None
    variable._value = torch.nn.Parameter(value, requires_grad=variable._value.requires_grad)
    place(variable, session, None if layout is None else _layout(layout, value, session))
    torch_modules.follow(variable, before)
    return variable


def distribute_tensor(tensor: Any, layout: Any, sessions: Sessions) -> Any:
    """`tensor` in `layout`."""
    session = sessions.required()
    tensor = keras.ops.convert_to_tensor(tensor)
    return session.strategy.activation(tensor, _layout(layout, tensor, session))


def all_gather_variable(variable: Any, sessions: Sessions) -> Any:
    """The whole value, plain."""
    strategy = strategy_of(variable, sessions)
    return variable._value.detach() if strategy is None else strategy.whole(variable._value)


def all_reduce(tensor: Any, op: ReduceOp, axis_name: str | None, sessions: Sessions) -> Any:
    """The tensors of the ranks along the axis are pending parts of one tensor: it is reduced."""
    session = sessions.required()
    tensor = _plain(tensor, "all_reduce", session)
    whole = Layout.replicated(session.mesh, tensor.ndim)
    pending = Layout(session.mesh, whole.spec, dict.fromkeys(_axes(axis_name, session), op))
    parts = session.strategy.join(tensor, pending, tuple(tensor.shape))
    return session.strategy.local(session.strategy.activation(parts, whole))


def all_gather(tensor: Any, dim: int, axis_name: str | None, sessions: Sessions) -> Any:
    """The tensors of the ranks along the axis are chunks of one tensor: it is gathered."""
    session = sessions.required()
    tensor = _plain(tensor, "all_gather", session)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LayoutError(
            f"all_gather was asked to join along dim {dim}, but the tensor has shape "
            f"{tuple(tensor.shape)}: give a dim from {-tensor.ndim} to {tensor.ndim - 1}."
        )
    dim %= tensor.ndim
    axes = _axes(axis_name, session)
    spec = tuple(axes if each == dim else None for each in range(tensor.ndim))
    shape = list(tensor.shape)
    for axis in axes:
        shape[dim] *= session.mesh.axis_size(axis)
    chunks = session.strategy.join(tensor, Layout(session.mesh, spec), tuple(shape))
    whole = Layout.replicated(session.mesh, tensor.ndim)
    return session.strategy.local(session.strategy.activation(chunks, whole))


def ensure_dtensor(tensor: Any, layout: Any, sessions: Sessions) -> Any:
    """`tensor` as the strategy's own kind."""
    session = sessions.required()
    value = tensor._value if isinstance(tensor, keras.Variable) else tensor
    value = keras.ops.convert_to_tensor(value)
    if session.strategy.owns(value) and layout is None:
        return value
    target = (None,) * value.ndim if layout is None else layout
    return session.strategy.activation(value, _layout(target, value, session))


def ensure_dtensor_input(data: Any, sessions: Sessions) -> Any:
    """A batch split as `fit` splits it."""
    return batches.distribute(data, sessions.required())


def mesh_info(sessions: Sessions) -> dict[str, Any]:
    """Shape, axis names and devices of the mesh."""
    session = sessions.required()
    device_mesh = session.distribution.device_mesh
    return {
        "shape": session.mesh.shape,
        "axis_names": session.mesh.axis_names,
        "devices": device_mesh.devices.tolist(),
    }


def _layout(layout: Any, tensor: torch.Tensor, session: Session) -> Layout:
    """A `TensorLayout`, or a tuple of axis names, as a layout of `tensor`."""
    found = layout.backend_layout if hasattr(layout, "axes") else Layout(session.mesh, layout)
    return found.fitting(tensor.shape, "A tensor")


def _axes(axis_name: str | None, session: Session) -> tuple[str, ...]:
    if axis_name is None:
        return session.mesh.axis_names
    session.mesh.axis_index(axis_name)
    return (axis_name,)


def _plain(tensor: Any, name: str, session: Session) -> torch.Tensor:
    plain: torch.Tensor = keras.ops.convert_to_tensor(tensor)
    if session.strategy.owns(plain):
        raise LayoutError(
            f"{name} takes a plain tensor, this rank's own values, but got a sharded one of shape "
            f"{tuple(plain.shape)}: use shardcore.distribute_tensor(tensor, layout) to change it."
        )
    return plain
