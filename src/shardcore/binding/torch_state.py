"""The tensors of a torch module: their names, where it holds them, and how they are laid out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardcore.binding.agreement import digest
from shardcore.binding.session import Session
from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout


def stored(tensor: torch.Tensor, layout: Layout | None, session: Session) -> torch.Tensor:
    """What takes the place of a parameter or buffer, which is plain, whole and equal on all ranks.

    The strategy keeps it, replicated where no layout is given.
    """
    layout = layout or Layout.replicated(session.mesh, tensor.ndim)
    kept: torch.Tensor = session.strategy.create(tensor.detach(), layout)
    if isinstance(tensor, torch.nn.Parameter):
        kept = torch.nn.Parameter(kept, requires_grad=tensor.requires_grad)
        if kept.requires_grad:
            session.strategy.track(kept, layout)
    return kept


def agree(module: torch.nn.Module, session: Session) -> None:
    """Give every rank rank 0's values, where torch's generators have drawn others."""
    state = [*module.parameters(), *module.buffers()]
    plain = [tensor for tensor in state if not session.strategy.owns(tensor)]
    everyone = session.processes.gather([f"{t.shape} {t.dtype} {digest(t)}" for t in plain])
    for number, tensor in enumerate(plain):
        if len({digests[number] for digests in everyone}) > 1:
            value = session.processes.gather(tensor.detach().cpu())[0]
            with torch.no_grad():
                tensor.copy_(value)


def replace_tensors(module: torch.nn.Module, replacements: Mapping[int, torch.Tensor]) -> None:
    """Put other tensors in the place of some, wherever the module or a submodule holds them.

    A torch module keeps its parameters and buffers in dicts among its attributes; some keep them
    in lists or under names of their own as well, such as the weights that an RNN hands on. The new
    tensors are by the `id` of the old ones.

    Raises:
        StrategyError: If the module keeps a parameter where it cannot be replaced.
    """
    for holder in module.modules():
        _replace_in(vars(holder), replacements)
        for name, value in list(vars(holder).items()):
            if isinstance(value, dict):
                _replace_in(value, replacements)
            elif isinstance(value, list):
                value[:] = [replacements.get(id(each), each) for each in value]
            elif type(value) is tuple:
                vars(holder)[name] = tuple(replacements.get(id(each), each) for each in value)
    for name, parameter in module.named_parameters():
        if replacements.get(id(parameter), parameter) is not parameter:
            raise StrategyError(
                f"Parameter {name!r} of {type(module).__name__} cannot be laid out: the module "
                "does not keep it in its attributes, as a TorchScript module. Give the module that "
                "it was made from."
            )


@contextmanager
def holding(
    module: torch.nn.Module, swapped: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Let `module` hold the second tensor of each pair in the place of the first, for a while."""
    replace_tensors(module, {id(old): new for old, new in swapped})
    try:
        yield
    finally:
        replace_tensors(module, {id(new): old for old, new in swapped})


def _replace_in(held: dict[Any, Any], replacements: Mapping[int, torch.Tensor]) -> None:
    for name, value in held.items():
        if id(value) in replacements:
            held[name] = replacements[id(value)]
