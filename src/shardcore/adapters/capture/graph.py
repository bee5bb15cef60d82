"""A tape as a graph of torch.fx, which runs without asking anything."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.tape import Call, Number, Tape, Value, values


def graph_of(tape: Tape, literals: Mapping[int, torch.Tensor]) -> fx.GraphModule:
    """The calls of `tape` as a module that is called with its inputs and what is outside.

    Args:
        tape: What a step did.
        literals: By number, the constants among what is outside: they become the module's.
    """
    builder = _Builder(literals)
    kept = (number for number in tape.outside if number not in literals)
    for number in [*(each.number for each in tape.inputs), *kept]:
        builder.nodes[number] = builder.graph.placeholder(f"v{number}")
    written = written_memories(tape)
    for number in literals:
        builder.literal(number, is_written=tape.memory[number] in written)
    for number, tensor in tape.kept.items():
        builder.kept(number, tensor)
    for call in tape.calls:
        builder.call(call)
    leaves = [each for each in torch_compat.tree_leaves(tape.outputs) if isinstance(each, Value)]
    builder.graph.output(tuple(builder.nodes[each.number] for each in leaves))
    return fx.GraphModule(builder.root, builder.graph)


class _Builder:
    """Appends calls to a graph."""

    def __init__(self, literals: Mapping[int, torch.Tensor]) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.root = torch.nn.Module()
        for number, value in literals.items():
            self.root.register_buffer(f"literal{number}", value.detach().clone())

    def literal(self, number: int, is_written: bool) -> None:
        """A constant; where a run writes into it, each gets a copy."""
        node = self.graph.get_attr(f"literal{number}")
        if is_written:
            node = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        self.nodes[number] = node

    def kept(self, number: int, tensor: torch.Tensor) -> None:
        """A tensor of the program's own."""
        self.root.register_buffer(f"kept{number}", tensor)
        self.nodes[number] = self.graph.get_attr(f"kept{number}")

    def call(self, call: Call) -> None:
        """One more node."""
        args, kwargs = torch_compat.tree_map(self._node, (call.args, call.kwargs))
        self._name(call.result, self.graph.call_function(call.operator, args, kwargs))

    def _name(self, result: Any, node: fx.Node) -> None:
        """`node` gives the values in `result`."""
        if isinstance(result, Value):
            # What is written in place stays the node that it was: the order of calls is kept.
            self.nodes.setdefault(result.number, node)
        elif isinstance(result, list | tuple):
            for place, part in enumerate(result):
                if any(True for _ in values(part)):
                    self._name(part, self.graph.call_function(operator.getitem, (node, place)))

    def _node(self, leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return self.graph.call_method("item", (self.nodes[leaf.value.number],))
        return self.nodes[leaf.number] if isinstance(leaf, Value) else leaf
