"""Advice: the collectives of a step that another rule would avoid, and that rule."""

from collections.abc import Iterable, Iterator, Sequence

from shardcore.domain.cost.collectives import Avoidable, ExplainedLayer
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.layouts.placements import Shard
from shardcore.domain.layouts.spec import DimSpec, dim_spec, entry_axes, without_axes

Rules = dict[str, tuple[DimSpec, ...] | None]

# An all-to-all replaces an all-gather if another dim is sharded instead.
_GATHERS = ("all_gather", "all_to_all")
_PHASES = ("forward", "loss and metrics")

# As in the policies: below it the latency of a collective exceeds the time for its bytes.
SMALL = 64 * 1024
# The number of rules of one advice that are printed; the data has all.
MOST_PRINTED = 4


def advise(
    moved: Sequence[CollectiveFacts], layers: Sequence[ExplainedLayer]
) -> tuple[Avoidable, ...]:
    """Finds the all-gathers that a layout forces, each once with the rules to change.

    A large weight that is all-gathered for use is left out, since its sharding saves memory. So is
    the reduction of a partial sum, which every sharded kernel needs.
    """
    avoidable: list[Avoidable] = []
    ruled: set[str] = set()  # one change at a time: a changed rule changes later collectives
    for facts in moved:
        if facts.kind in _GATHERS and not facts.reduced and facts.phase in _PHASES:
            advised = _advice(facts, layers)
            if advised is not None and ruled.isdisjoint(advised.rules):
                avoidable.append(advised)
                ruled.update(advised.rules)
    return (*avoidable, *_small_variables(moved, layers))


def _advice(facts: CollectiveFacts, layers: Sequence[ExplainedLayer]) -> Avoidable | None:
    if facts.rule:
        if _gathers_tokens(facts):  # once, for all layers that need them
            return None
        return Avoidable(
            facts.collective(),
            f"rule {facts.rule!r} has the output gathered",
            {facts.rule: None},
            "the output stays as it is computed",
        )
    if (
        facts.variable is not None
        or set(facts.batch_axes) & set(facts.axes)
        or len(facts.axes) != 1
    ):
        return None
    return _by_rows(facts, layers) or _replicated_producer(facts, layers)


def _small_variables(
    moved: Iterable[CollectiveFacts], layers: Sequence[ExplainedLayer]
) -> Iterator[Avoidable]:
    """Yields advice for small sharded variables, whose all-gathers cost more than shards save."""
    small = {v.path: v for layer in layers for v in layer.variables if v.bytes < SMALL}
    by_axes: dict[tuple[str, ...], dict[str, CollectiveFacts]] = {}
    for facts in moved:
        if facts.kind in _GATHERS and facts.variable in small:
            by_axes.setdefault(facts.axes, {}).setdefault(str(facts.variable), facts)
    for axes, gathered in by_axes.items():
        first, *others = gathered
        named = first if not others else f"{first} and {len(others)} more small variables"
        more = sum(
            small[path].bytes * (1 - 1 / len(gather.processes)) for path, gather in gathered.items()
        )
        yield Avoidable(
            gathered[first].collective(),
            f"{named} {'are' if others else 'is'} sharded over {', '.join(map(repr, axes))} and "
            "all-gathered at each use",
            {path: without_axes(small[path].spec, *axes) for path in gathered},
            f"each rank keeps {round(more)} bytes more, and all-gathers none of them",
        )


def _by_rows(facts: CollectiveFacts, layers: Sequence[ExplainedLayer]) -> Avoidable | None:
    """Advises to shard a kernel by rows, so that its input stays sharded by features."""
    layer = next((layer for layer in layers if layer.path == facts.layer), None)
    size = _features(facts)
    if layer is None or size is None:
        return None
    kernels = (variable for variable in layer.variables if len(variable.shape) > 1)
    kernel = next((kernel for kernel in kernels if kernel.shape[-2] == size), None)
    axis = facts.axes[0]
    if kernel is None or len(layer.shape or ()) < 2 or axis in entry_axes(kernel.spec[-2]):
        return None
    with_axis = dim_spec((*entry_axes(kernel.spec[-2]), axis))
    rows = (*kernel.spec[:-2], with_axis, *without_axes(kernel.spec[-1:], axis))
    others = [
        variable
        for variable in layer.variables
        if variable is not kernel and _is_sharded_over(variable.spec, axis)
    ]  # the output is replicated then
    placed = "sharded by its last dim" if axis in entry_axes(kernel.spec[-1]) else "replicated"
    return Avoidable(
        facts.collective(),
        f"layer {layer.path}: {kernel.name} is {placed}, so its input, sharded over {axis!r}, "
        "is all-gathered",
        {kernel.path: rows, **{other.path: without_axes(other.spec, axis) for other in others}},
        "the kernel takes its input as it is sharded; its output, a partial sum, is reduced",
    )


def _replicated_producer(
    facts: CollectiveFacts, layers: Sequence[ExplainedLayer]
) -> Avoidable | None:
    """Advises to replicate the last layer before, whose output is all-gathered."""
    axis = facts.axes[0]
    paths = [layer.path for layer in layers]
    upto = paths.index(facts.layer) if facts.layer in paths else len(layers)
    for layer in reversed(layers[:upto]):
        sharded = [
            variable for variable in layer.variables if _is_sharded_over(variable.spec, axis)
        ]
        if sharded and layer.spec is not None and _is_sharded_over(layer.spec, axis):
            return Avoidable(
                facts.collective(),
                f"{facts.layer or 'the loss'} needs the full output of {layer.path}, sharded over "
                f"{axis!r}",
                {variable.path: without_axes(variable.spec, axis) for variable in sharded},
                f"each rank of {axis!r} computes all of {layer.path}, and nothing is all-gathered",
            )
    return None


def _gathers_tokens(facts: CollectiveFacts) -> bool:
    """Tells whether a dim between batch and features is all-gathered: the sequence."""
    inner = range(1, len(facts.shape or ()) - 1)
    return any(
        isinstance(placement, Shard) and placement.dim in inner
        for placement in facts.source_placements()
    )


def _features(facts: CollectiveFacts) -> int | None:
    """Finds the size of the last dim, if that is all-gathered."""
    if facts.shape is None or facts.source is None or not facts.shape:
        return None
    last = len(facts.shape) - 1
    gathered = facts.source_placements() == (Shard(last),) and facts.target_placements() != (
        Shard(last),
    )
    return facts.shape[last] if gathered else None


def _is_sharded_over(spec: Iterable[DimSpec], axis: str) -> bool:
    return any(axis in entry_axes(entry) for entry in spec)


def rules_as_code(rules: Rules) -> str:
    """Writes the rules as the lines of code that set them; of many rules, the first ones.

    Example:
        >>> rules_as_code({"down/kernel": ("model", None), "down/output": None})
        "layout_map['down/kernel'] = ('model', None); take out the rule 'down/output'"
    """
    lines = [
        f"take out the rule {key!r}" if spec is None else f"layout_map[{key!r}] = {spec!r}"
        for key, spec in rules.items()
    ]
    more = [f"and {len(lines) - MOST_PRINTED} more alike"] if len(lines) > MOST_PRINTED else []
    return "; ".join([*lines[:MOST_PRINTED], *more])
