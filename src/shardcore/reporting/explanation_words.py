"""What an explanation says in words and sums: for the table and for the picture."""

from collections import Counter
from collections.abc import Callable

import attrs

from shardcore.domain.explanation.advice import said
from shardcore.domain.explanation.collectives import Avoidable, Collective, ExplainedLayer
from shardcore.domain.mesh import Mesh
from shardcore.reporting.tables import human_bytes


@attrs.frozen
class Explained:
    """What one step of a model moves between ranks, as this rank saw it.

    Args:
        model: The model's name.
        step: "train", "test" or "predict".
        mesh: The mesh; None where no distribution is set.
        strategy: The strategy's name; empty where no distribution is set.
        rank: The rank of the mesh that this is of.
        layers: The layers that the step called, in the order of the first calls.
        collectives: The collectives of the step, in order; equal ones once, with how often.
        avoidable: Those that another rule would spare, with the rule.
    """

    model: str
    step: str
    mesh: Mesh | None
    strategy: str
    rank: int
    layers: tuple[ExplainedLayer, ...]
    collectives: tuple[Collective, ...]
    avoidable: tuple[Avoidable, ...] = ()

    @property
    def calls(self) -> "Counter[str]":
        """How many collectives are started, by kind."""
        return self._sum(lambda each: 1)

    @property
    def operand_bytes(self) -> "Counter[str]":
        """The bytes of this rank's operands, by kind."""
        return self._sum(lambda each: each.operand_bytes)

    def _sum(self, value: Callable[[Collective], int]) -> "Counter[str]":
        total: Counter[str] = Counter()
        for each in self.collectives:
            total[each.kind] += each.times * value(each)
        return total

    def is_avoidable(self, collective: Collective) -> bool:
        """Returns whether another rule would spare `collective`."""
        once = attrs.evolve(collective, times=1)
        return any(each.collective == once for each in self.avoidable)

    def title(self) -> str:
        """Returns the model, the step and where it ran, in one line."""
        where = "no distribution is set"
        if self.mesh is not None:
            where = f"strategy {self.strategy}, mesh {self.mesh}, rank {self.rank}"
        return f"one {self.step} step of model {self.model!r}: {where}"

    def summary(self) -> str:
        """How much is moved, in one line."""
        if not self.collectives:
            why = ": no distribution is set" if self.mesh is None else ""
            if self.mesh is not None and self.mesh.size == 1:
                why = ": the mesh is of one device"
            return f"Nothing is moved between ranks{why}."
        calls, size = sum(self.calls.values()), sum(self.operand_bytes.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.calls.items())
        return f"{calls} collectives ({kinds}) on {human_bytes(size)} of this rank."

    def advice(self) -> tuple[str, ...]:
        """One line for each avoidable collective."""
        return tuple(
            f"Avoidable: {each.problem}. Instead: {said(each.rules)}. Then {each.effect}."
            for each in self.avoidable
        )
