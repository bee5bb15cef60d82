"""A traced step divided among groups of layers."""

from collections.abc import Iterator, Mapping

import attrs

from shardcore.domain.explanation.reasons import CollectiveFacts
from shardcore.domain.steps.events import Operators, TracedCollective, TracedMemory, TracedStep

# The group of what belongs to no layer, such as the loss.
REST = ""


def layer_steps(step: TracedStep, groups: Mapping[str, str]) -> dict[str, TracedStep]:
    """Returns the part of a step that belongs to each group, and the rest.

    A part has the operators and the collectives of its layers. Of memory it has the tensors of its
    variables, and what the sums of its gradients allocate.

    Args:
        step: The step. Its blocks are the layers.
        groups: The group of each layer, by its path.
    """
    owners = _Owners(groups)
    operators: dict[str, list[Operators]] = {}
    collectives: dict[str, list[TracedCollective]] = {}
    memory: dict[str, list[TracedMemory]] = {}
    for per_block in step.operators:
        for group, part in _by_group(per_block, owners):
            operators.setdefault(group, []).append(part)
    for started in step.collectives:
        collectives.setdefault(_group(started, owners), []).append(started)
    for held in step.memory:
        path = held.sum_of or (held.stored.path if held.stored else "")
        if path:
            memory.setdefault(owners.of(path), []).append(held)
    return {
        group: attrs.evolve(
            step,
            operators=tuple(operators.get(group, ())),
            collectives=tuple(collectives.get(group, ())),
            memory=tuple(memory.get(group, ())),
        )
        for group in dict.fromkeys([*groups.values(), REST])
    }


@attrs.frozen
class _Owners:
    """The groups of paths."""

    groups: Mapping[str, str]

    def of(self, path: str) -> str:
        """Returns the group of the layer with that path, or of the nearest one above it."""
        while path and path not in self.groups:
            path = path.rpartition("/")[0]
        return self.groups[path] if path else REST


def _by_group(operators: Operators, owners: _Owners) -> Iterator[tuple[str, Operators]]:
    """Yields operators by group: those of several blocks by the bytes of each."""
    left = operators.work.bytes
    for block, size in operators.shares:
        left -= size
        yield owners.of(block), Operators(attrs.evolve(operators.work, flops=0, bytes=size))
    yield (
        owners.of(operators.block),
        attrs.evolve(operators, work=attrs.evolve(operators.work, bytes=left)),
    )


def _group(started: TracedCollective, owners: _Owners) -> str:
    """Returns the group of a collective: that of the variable that it moves, or of its block."""
    return owners.of(_variable(started.facts)) or owners.of(started.block or started.facts.layer)


def _variable(facts: CollectiveFacts) -> str:
    return facts.reduced[0] if facts.reduced else facts.variable or ""
