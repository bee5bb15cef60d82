"""The tensors of a torch module: layout, comparison between ranks, and replacement."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from keras.layers import TorchModuleWrapper

from shardcore.binding.ranks.rank_consistency import digest
from shardcore.binding.ranks.session import Session
from shardcore.domain.errors import ArgumentProblem
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.strategy import NewVariable


def store_tensor(
    tensor: torch.Tensor, path: str, layout: Layout | None, session: Session
) -> torch.Tensor:
    """Stores a plain parameter or buffer, equal on all ranks, as the strategy's tensor.

    It is replicated if no layout is given. `path` is its name in the module.
    """
    layout = layout or Layout.replicated(session.mesh, tensor.ndim)
    new = NewVariable(path, tuple(tensor.shape), layout, session.batch_axes, of_optimizer=False)
    parameter = session.create_tensor(tensor.detach(), layout, new)
    if isinstance(tensor, torch.nn.Parameter):
        parameter = torch.nn.Parameter(parameter, requires_grad=tensor.requires_grad)
        if parameter.requires_grad:
            session.strategy.redistribute_gradients(parameter, layout)
    return parameter


def buffers(wrapper: TorchModuleWrapper, session: Session) -> dict[int, torch.Tensor]:
    """Replicates the plain buffers of a wrapped module: the new ones, by the `id` of the old."""
    return {
        id(buffer): store_tensor(buffer, f"{wrapper.path}/{name.replace('.', '/')}", None, session)
        for name, buffer in wrapper.module.named_buffers()
        if not session.strategy.owns(buffer)
    }


def agree(module: torch.nn.Module, session: Session) -> None:
    """Copies the values of rank 0 to every rank, if torch's generators have drawn others."""
    state = [*module.parameters(), *module.buffers()]
    plain = [tensor for tensor in state if not session.strategy.owns(tensor)]
    everyone = session.processes.gather([f"{t.shape} {t.dtype} {digest(t)}" for t in plain])
    for number, tensor in enumerate(plain):
        if len({digests[number] for digests in everyone}) > 1:
            sent = tensor.detach().cpu() if session.processes.rank == 0 else None
            value: Any = session.processes.gather(sent)[0]  # of rank 0
            with torch.no_grad():
                tensor.copy_(value)


def replace_tensors(module: torch.nn.Module, replacements: Mapping[int, torch.Tensor]) -> None:
    """Replaces tensors in all places where the module or a submodule holds them.

    A torch module holds its parameters and buffers in dicts among its attributes. Some also hold
    them in lists or other attributes, such as the flat weights of an RNN. `replacements` has the
    new tensors by the `id` of the old ones.
    """
    for holder in module.modules():
        _replace_in(vars(holder), replacements)
        for name, value in list(vars(holder).items()):
            if isinstance(value, dict):
                _replace_in(value, replacements)
            elif isinstance(value, list):
                value[:] = [replacements.get(id(member), member) for member in value]
            elif type(value) is tuple:
                vars(holder)[name] = tuple(replacements.get(id(member), member) for member in value)
    for name, parameter in module.named_parameters():
        if replacements.get(id(parameter), parameter) is not parameter:
            raise ArgumentProblem(
                f"Parameter {name!r} of {type(module).__name__} cannot be laid out: the module "
                "does not keep it in its attributes, as a TorchScript module. Give the module that "
                "it was made from.",
                name=name,
            )


@contextmanager
def holding(
    module: torch.nn.Module, swapped: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Opens a context in which `module` holds the second tensor of each pair, not the first."""
    replace_tensors(module, {id(old): new for old, new in swapped})
    try:
        yield
    finally:
        replace_tensors(module, {id(new): old for old, new in swapped})


def _replace_in(held: dict[Any, Any], replacements: Mapping[int, torch.Tensor]) -> None:
    for name, value in held.items():
        if id(value) in replacements:
            held[name] = replacements[id(value)]
