"""The reason of a collective, in words."""

import attrs

from shardcore.domain.cost.collective_cost import bytes_sent_of
from shardcore.domain.cost.collectives import Collective, Phase
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Partial, Placement, Shard
from shardcore.domain.layouts.spec import named_axes

# Reads a value on the host.
_READS = "aten._local_scalar_dense"


@attrs.frozen
class CollectiveFacts:
    """The facts about one collective, from which its reason follows.

    Args:
        kind: "all_reduce", "all_gather", ...
        phase: The phase of the step.
        axes: The mesh axes.
        processes: The processes that take part.
        operand_bytes: The bytes of this rank's operands.
        layer: The path of the layer, empty outside the model.
        operator: The operator that needs it, empty if none does.
        fell_back: Whether the operator runs on full operands, as it cannot be sharded.
        shape: The global shape of the tensor, None if it is unknown.
        source: The layout before.
        target: The layout after.
        variable: The variable that is moved, None for another tensor.
        reduced: The variables whose gradients are moved; outside a backward pass, those whose
            new values are moved.
        cause: A name of the tensor, "the layer's output:", if Keras needs it, not an operator.
        rule: The key of the rule that causes it, empty if none does.
        batch_axes: The axes that shard batches.
    """

    kind: str
    phase: Phase = "forward"
    axes: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    operand_bytes: int = 0
    layer: str = ""
    operator: str = ""
    fell_back: bool = False
    shape: tuple[int, ...] | None = None
    source: Layout | None = None
    target: Layout | None = None
    variable: str | None = None
    reduced: tuple[str, ...] = ()
    cause: str = ""
    rule: str = ""
    batch_axes: tuple[str, ...] = ()

    def source_placements(self) -> tuple[Placement, ...]:
        """The placements along `axes` before; empty if unknown."""
        return () if self.source is None else tuple(map(self.source.placement, self.axes))

    def target_placements(self) -> tuple[Placement, ...]:
        """The placements along `axes` after; empty if unknown."""
        return () if self.target is None else tuple(map(self.target.placement, self.axes))

    def collective(self) -> Collective:
        """Converts the facts to what users see, with the reason in words."""
        ranks = len(self.processes)
        changes = zip(self.source_placements(), self.target_placements(), strict=True)
        return Collective(
            kind=self.kind,
            phase=self.phase,
            layer=self.layer,
            operator=self.operator,
            axes=self.axes,
            ranks=ranks,
            operand_bytes=self.operand_bytes,
            sent_bytes=bytes_sent_of(self.kind, ranks, self.operand_bytes),
            variables=self.reduced or ((self.variable,) if self.variable else ()),
            shape=self.shape,
            change=", ".join(f"{before} -> {after}" for before, after in changes),
            reason=reason(self),
        )


def reason(facts: CollectiveFacts) -> str:
    """Writes the reason in words.

    Example:
        >>> facts = CollectiveFacts("all_reduce", "backward", ("data",), reduced=("dense/kernel",))
        >>> reason(facts)
        "the gradient of dense/kernel, summed over axis 'data'"
    """
    if facts.reduced:
        return _gradient_reason(facts)
    if facts.cause:
        return f"{facts.cause} {_change_words(facts)}"
    if facts.fell_back:
        return f"{facts.operator} cannot be sharded for these operands: they are replicated first"
    if facts.variable is not None and facts.kind == "all_gather":
        over = ("the batch " if set(facts.batch_axes) & set(facts.axes) else "") + _axes_words(
            facts.axes
        )
        return f"{facts.variable}: sharded over {over}, all-gathered{_operator_words(facts)}"
    return (
        f"{facts.variable or _tensor_words(facts)}: {_change_words(facts)}{_operator_words(facts)}"
    )


def _gradient_reason(facts: CollectiveFacts) -> str:
    first, *others = facts.reduced
    what = "gradient" if facts.phase == "backward" else "new value"
    named = f"the {what}s of {first} and {len(others)} more" if others else f"the {what} of {first}"
    over = _axes_words(facts.axes)
    if facts.kind == "all_reduce":
        return f"{named}, summed {'together ' if others else ''}over {over}"
    if facts.kind == "reduce_scatter":
        return f"{named}, summed over {over}: each rank keeps its shard"
    return f"{named}, redistributed to the layout of the variable"


def _tensor_words(facts: CollectiveFacts) -> str:
    """Names the tensor, if it is neither a variable nor the gradient of one."""
    if facts.operator.startswith(_READS):
        return "a value that is read on the host"
    if facts.operator:
        return "a gradient" if facts.phase == "backward" else "an operand"
    if facts.phase == "backward":
        output = f"the output of {facts.layer}" if facts.layer else "the loss"
        return f"the gradient of {output}"
    return "a value"


def _change_words(facts: CollectiveFacts) -> str:
    """Names the placement before, and the change."""
    over, after = _axes_words(facts.axes), facts.target_placements()
    dims = [placement.dim for placement in after if isinstance(placement, Shard)]
    for before in facts.source_placements():
        if isinstance(before, Partial):
            kept = f", each rank keeps its shard of dim {dims[0]}" if dims else ""
            return f"a partial {before.op} over {over}, reduced{kept}"
        if isinstance(before, Shard):
            sharded = f"sharded by dim {before.dim} over {over}"
            if facts.kind == "send":
                return f"{sharded}, sent on to the next rank"
            if not dims:
                return f"{sharded}, all-gathered"
            into = "other shards" if dims[0] == before.dim else f"shards of dim {dims[0]}"
            return f"{sharded}, redistributed into {into}"
    return {
        "all_reduce": f"a partial value over {over}, reduced",
        "reduce_scatter": f"a partial value over {over}, reduced, each rank keeps its shard",
        "all_gather": f"sharded over {over}, all-gathered",
        "all_to_all": f"sharded over {over}, redistributed into shards of another dim",
    }.get(facts.kind, f"sent over {over}")


def _operator_words(facts: CollectiveFacts) -> str:
    if not facts.operator or facts.operator.startswith(_READS):
        return ""
    return f" for {facts.operator}"


def _axes_words(axes: tuple[str, ...]) -> str:
    if not axes:
        return "a group of processes outside the mesh"
    return named_axes(axes)
