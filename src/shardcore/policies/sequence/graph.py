"""Where a sequence is split in a model whose graph is known, and where it is gathered."""

from collections.abc import Iterable, Mapping

import attrs

from shardcore.policies.layers.regions import Graph
from shardcore.policies.sequence.roles import Role, Roles
from shardcore.ports.model import LayerFacts

# What gives parts, what passes them on, what takes the whole sequence by several products.
_SOURCES = ("tokens", "rows", "region", "block")
_PASSING = ("each", "norm", "block")
_REGIONS = ("columns", "region")


@attrs.frozen
class Flow:
    """What becomes of the outputs of a functional model's layers.

    Args:
        graph: Its graph.
        roles: The roles of its layers, by name.
    """

    graph: Graph
    roles: Mapping[str, Role]

    @classmethod
    def of(cls, model: LayerFacts, roles: Roles) -> "Flow":
        """The flow through `model`, which has a graph."""
        return cls(Graph.of(model), {each.name: roles.of(each) for each in model.children})

    def split(self) -> list[str]:
        """The layers whose outputs are computed in parts of the sequence.

        Where a region would gather the parts for each of its products, as the norm before it feeds
        a short cut too, all that is added up with them stays whole.
        """
        sources = {name for name, role in self.roles.items() if role in _SOURCES}
        while True:
            split = self._reached(sources)
            costly = [name for name in split if self._is_costly(name)]
            if not costly:
                return [name for name in split if self._is_of_use(name)]
            sources -= self._together(costly, split)

    def is_gathered(self, name: str) -> bool:
        """Whether the output of `name`, which is split, is gathered there: all users need that."""
        users = self.graph.users[name]
        is_layer = bool(self.graph.nodes[name].output_path)
        return is_layer and bool(users) and not any(map(self._passes, users))

    def _reached(self, sources: set[str]) -> list[str]:
        """The sources, and what passes parts on; the nodes are in the order of the graph."""
        split: dict[str, None] = {}
        for name, role in self.roles.items():
            is_fed = not split.keys().isdisjoint(self.graph.producers[name])
            if name in sources or (role in ("each", "norm") and is_fed):
                split[name] = None
        return list(split)

    def _passes(self, name: str) -> bool:
        return self.roles[name] in _PASSING

    def _is_of_use(self, name: str) -> bool:
        """Whether somebody computes with the parts; a sum that nobody does is reduced whole."""
        return any(map(self._passes, [name, *self.graph.users[name]]))

    def _is_costly(self, name: str) -> bool:
        users = [self.roles[user] for user in self.graph.users[name]]
        return not self.is_gathered(name) and not set(_REGIONS).isdisjoint(users)

    def _together(self, names: Iterable[str], split: list[str]) -> set[str]:
        """`names`, and what meets them without being gathered between."""
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in found or name not in split:
                continue
            found.add(name)
            todo += filter(self._passes, self.graph.users[name])
            todo += self.graph.producers[name] if self._passes(name) else []
        return found
