"""The edges of a torch module: what goes in is sharded, what comes out has no sum pending."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from shardcore.binding import seams
from shardcore.binding.session import Session
from shardcore.domain.layout import Layout


@attrs.define(eq=False)
class ModuleEdge:
    """What `binding.layers` does for a Keras layer, for a torch module, by its hooks.

    Args:
        session: Whose strategy lays tensors out.
        edges: Where those of all modules are noted.
        output: The layout that a rule gives the output, if any.
    """

    session: Session
    edges: MutableMapping[torch.nn.Module, "ModuleEdge"]
    output: Layout | None
    _handles: list[Any] = attrs.field(factory=list, init=False)

    def attach(self, module: torch.nn.Module) -> None:
        """Go to work on `module`."""
        self.edges[module] = self
        enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._handles = [enter, module.register_forward_hook(self._leave)]

    def detach(self) -> None:
        """Leave the module as it was."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if seams.is_symbolic():
            return args, kwargs
        entered: tuple[Any, Any] = seams.map_tensors(self._promoted, (args, kwargs))
        return entered

    def _leave(self, _module: Any, _args: Any, outputs: Any) -> Any:
        return outputs if seams.is_symbolic() else seams.map_tensors(self._relaid, outputs)

    def _promoted(self, tensor: Any) -> Any:
        """A plain tensor as a replicated one; the gradient of any comes out without a sum."""
        if not self.session.strategy.owns(tensor):
            replicated = Layout.replicated(self.session.mesh, tensor.ndim)
            return self.session.strategy.activation(tensor, replicated)
        return self.session.strategy.activation(tensor, None)

    def _relaid(self, tensor: Any) -> Any:
        if self.output is not None:
            self.output.fitting(tensor.shape, "The output of a module that a rule names")
        return self.session.strategy.activation(tensor, self.output)


@contextmanager
def without_edges(
    module: torch.nn.Module, noted: MutableMapping[torch.nn.Module, ModuleEdge]
) -> Iterator[None]:
    """`module` without its edges, as a file should have it."""
    edges = {each: noted[each] for each in module.modules() if each in noted}
    for edge in edges.values():
        edge.detach()
    try:
        yield
    finally:
        for each, edge in edges.items():
            edge.attach(each)
