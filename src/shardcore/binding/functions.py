"""The functions of the public API on variables and tensors, with collectives by mesh axis."""

from contextlib import AbstractContextManager
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private, torch_modules
from shardcore.binding.data import batches
from shardcore.binding.engine import adoption
from shardcore.binding.engine.variable import full_tensor, store_variable
from shardcore.binding.keras_private.variables import set_tensor, tensor_of
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import ReduceOp
from shardcore.ports.types import Array, LayoutLike

Tensor = torch.Tensor  # by which `shardcore.tensor_api` names the class without an import of torch


@attrs.frozen
class Functions:
    """The functions that `shardcore.tensor_api` documents."""

    sessions: Sessions

    def distribute_variable(self, variable: keras.Variable, layout: LayoutLike | None) -> None:
        """Lays `variable` out again. Every rank takes rank 0's value."""
        session = self.sessions.required()
        value = self.all_gather_variable(variable)
        sent = value.cpu() if session.processes.rank == 0 else None
        value = torch.as_tensor(session.processes.gather(sent)[0], device=value.device)
        before = tensor_of(variable)
        keras_private.set_layout(variable, None)
        set_tensor(variable, torch.nn.Parameter(value, requires_grad=before.requires_grad))
        store_variable(
            variable, session, None if layout is None else _layout(layout, value, session)
        )
        torch_modules.follow(variable, before)

    def distribute_model(self, model: object) -> None:
        """Lays a model out again by the rules of the distribution that is set."""
        session = self.sessions.required()
        session.processes.barrier(f"distribute_model() of model {getattr(model, 'name', '')!r}")
        adoption.lay_out(rank_consistency.variables_of(model), session, model)

    def distribute_tensor(self, tensor: Array, layout: LayoutLike) -> Tensor:
        """Redistributes `tensor`: sharded, or plain and equal on all ranks."""
        session = self.sessions.required()
        value: Tensor = keras.ops.convert_to_tensor(tensor)
        return session.strategy.redistribute(value, _layout(layout, value, session))

    def all_gather_variable(self, variable: keras.Variable) -> Tensor:
        """All-gathers the full value, a plain tensor without a gradient."""
        value: Tensor = full_tensor(tensor_of(variable).detach(), self.sessions)
        return value

    def all_reduce(self, tensor: Array, op: ReduceOp, axis_name: str | None) -> Tensor:
        """Reduces the ranks' tensors along the axis, which are partial values of one tensor."""
        session = self.sessions.required()
        tensor = _plain(tensor, "all_reduce", session)
        pending = dict.fromkeys(_axes(axis_name, session), op)
        layout = Layout(session.mesh, (None,) * tensor.ndim, pending)
        with self._collective_call(f"all_reduce({op!r})", tensor):
            return _full_tensor_of(tensor, layout, tuple(tensor.shape), session)

    def all_gather(self, tensor: Array, dim: int, axis_name: str | None) -> Tensor:
        """Gathers the ranks' tensors along the axis: they are chunks of one tensor."""
        session = self.sessions.required()
        tensor = _plain(tensor, "all_gather", session)
        if not -tensor.ndim <= dim < tensor.ndim:
            raise LayoutError(
                f"all_gather was asked to join along dim {dim}, but the tensor has shape "
                f"{tuple(tensor.shape)}: give a dim from {-tensor.ndim} to {tensor.ndim - 1}."
            )
        dim %= tensor.ndim
        axes = _axes(axis_name, session)
        spec = tuple(axes if index == dim else None for index in range(tensor.ndim))
        shape = list(tensor.shape)
        for axis in axes:
            shape[dim] *= session.mesh.axis_size(axis)
        with self._collective_call(f"all_gather(axis={dim})", tensor):
            return _full_tensor_of(tensor, Layout(session.mesh, spec), tuple(shape), session)

    def _collective_call(self, call: str, tensor: Tensor) -> AbstractContextManager[None]:
        kind = str(tensor.dtype).removeprefix("torch.")
        return self.sessions.collective_call(f"{call} of a tensor of {tuple(tensor.shape)} {kind}")

    def ensure_dtensor(self, tensor: Array, layout: LayoutLike | None) -> Tensor:
        """Redistributes a plain `tensor`, replicated by default, to one of the strategy's own."""
        session = self.sessions.required()
        own = tensor_of(tensor) if isinstance(tensor, keras.Variable) else tensor
        value: Tensor = keras.ops.convert_to_tensor(own)
        if session.strategy.owns(value) and layout is None:
            return value
        return self.distribute_tensor(value, (None,) * value.ndim if layout is None else layout)

    def ensure_dtensor_input(self, data: object) -> Any:
        """Shards a batch as `fit` does."""
        return batches.distribute(data, self.sessions.required())

    def mesh_info(self) -> dict[str, Any]:
        """Describes the mesh: "shape", "axis_names" and "devices", a nested list of names."""
        session = self.sessions.required()
        return {
            "shape": session.mesh.shape,
            "axis_names": session.mesh.axis_names,
            "devices": session.distribution.device_mesh.devices.tolist(),
        }


def _full_tensor_of(
    part: torch.Tensor, layout: Layout, shape: tuple[int, ...], session: Session
) -> torch.Tensor:
    """Joins the parts of all ranks to a plain full tensor on every rank."""
    joined = session.from_local(part, layout, shape)
    replicated = Layout.replicated(session.mesh, part.ndim)
    return session.strategy.to_local(session.strategy.redistribute(joined, replicated))


def _layout(layout: Any, tensor: torch.Tensor, session: Session) -> Layout:
    """Parses a `TensorLayout`, or a tuple of axis names, and checks that it fits `tensor`."""
    backend_layout = (
        layout.backend_layout if hasattr(layout, "axes") else Layout(session.mesh, layout)
    )
    return backend_layout.fitting(tensor.shape, "A tensor")


def _axes(axis_name: str | None, session: Session) -> tuple[str, ...]:
    if axis_name is None:
        return session.mesh.axis_names
    session.mesh.axis_index(axis_name)
    return (axis_name,)


def _plain(tensor: Array, name: str, session: Session) -> torch.Tensor:
    plain: torch.Tensor = keras.ops.convert_to_tensor(tensor)
    if session.strategy.owns(plain):
        raise LayoutError(
            f"{name} takes a plain tensor, this rank's own values, but got a sharded one of shape "
            f"{tuple(plain.shape)}: use shardcore.distribute_tensor(tensor, layout) to change it."
        )
    return plain
