"""The proof of a declared rule: what simulated ranks compute from shards, beside one device."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import permutations

from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.call import Call, PlacedTensor
from shardcore.domain.engine.cuts import Cut
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.errors import ArgumentProblem, RuleError, describe_error, one_line
from shardcore.domain.layouts.chunks import chunk_sizes
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh

_MESHES = [Mesh((ranks,), ("x",)) for ranks in (2, 3, 4)]
_SQUARE = Mesh((2, 2), ("x", "y"))


def check_operator_rule(operator: object, *args: object, **kwargs: object) -> None:
    """Proves the declared rule of an operator on examples, without other processes.

    It shards each factor of the rule, and each two of them, over two, three and four ranks: in
    uneven parts and in blocks too, where the example has enough steps. The operator runs on the
    shards of each simulated rank, and the joined results have to be those of the full operands.

    Args:
        operator: The operator, whose rule is declared.
        *args: The arguments of an example call. Tensors have values that differ, and dims of
            several sizes, such as `torch.randn(6, 5)`.
        **kwargs: Those that the operator takes by name only.

    Raises:
        RuleError: If the rule is wrong: its attribute `name` has the factor, or the two.
        ArgumentProblem: If no rule is declared, or the example is too small to shard a factor.
        LayoutError: If the rule does not fit the shapes of the example.

    Example:
        >>> import shardcore, torch
        >>> @torch.library.custom_op("check_example::scale", mutates_args=())
        ... def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ...     return x * weight
        >>> shardcore.operator_rule(torch.ops.check_example.scale.default, "n k, k -> n k")
        >>> check_operator_rule(
        ...     torch.ops.check_example.scale.default, torch.randn(6, 5), torch.randn(5)
        ... )
    """
    import numpy as np

    from shardcore.adapters.engine.declared.arrays import ArrayCall
    from shardcore.testing.simulated_ranks import check_shards

    example = ArrayCall.of(operator, args, kwargs)
    rule, operands = example.rule, example.operands
    shapes = [operand.shape for operand in operands]
    extents = _call(rule, shapes, _SQUARE).extents
    for number, operand in enumerate(operands):
        if operand.dtype.kind == "f" and operand.size > 1 and np.unique(operand).size == 1:
            raise ArgumentProblem(
                name="check_operator_rule(*args)",
                expected=f"an example with values that differ in operand {number}",
                got=f"{operand.size} equal ones",
                remedy="shards of equal values hide a rule that is wrong: draw random values",
            )
    results, again = example.run(operands), example.run(operands)
    if not all(map(partial(np.array_equal, equal_nan=True), results, again)):
        raise ArgumentProblem(
            name="check_operator_rule(operator)",
            expected="an operator with the same results for the same operands",
            got=str(operator),
            remedy="one that draws random numbers has no rule",
        )
    for number, (term, result) in enumerate(zip(rule.results, results, strict=True)):
        sizes = [dim.size(extents) if dim.factor else None for dim in term.dims]
        if len(sizes) != result.ndim or any(
            size not in (None, full) for size, full in zip(sizes, result.shape, strict=True)
        ):
            raise RuleError(
                f"Rule '{rule}' of operator {operator} says that result {number} is '{term}', and "
                f"it has shape {result.shape} for operands of shapes {shapes}.",
                name=str(operator),
            )
    proved: set[str] = set()
    for mesh, cuts in _ways(rule, extents):
        call = _call(rule, shapes, mesh)
        layouts = [
            [call.layout(term, cuts) for term in terms] for terms in (rule.operands, rule.results)
        ]
        try:
            check_shards(
                lambda parts, _rank: example.run(parts),
                list(zip(operands, layouts[0], strict=True)),
                list(zip(results, layouts[1], strict=True)),
                example.tolerance,
            )
        except Exception as error:  # whatever the operator raises on shards
            raise _wrong(rule, operator, mesh, cuts, error) from error
        proved |= cuts.keys()
    left = [factor for factor in extents if factor not in proved]
    if left:
        raise ArgumentProblem(
            name="check_operator_rule(*args)",
            expected=f"an example with two steps or more of factor {left[0]!r} of rule '{rule}'",
            got=f"operands of shapes {shapes}",
            remedy="one step cannot be sharded, and proves nothing",
        )


def _call(rule: OperatorRule, shapes: list[tuple[int, ...]], mesh: Mesh) -> Call:
    placed = (PlacedTensor(shape, Layout.replicated(mesh, len(shape))) for shape in shapes)
    return Call(rule, tuple(placed), (), False, Costs())


def _ways(
    rule: OperatorRule, extents: Mapping[str, int]
) -> Iterator[tuple[Mesh, Mapping[str, Cut]]]:
    """Yields meshes with the cuts of factors that leave each rank a step: of one, then of two."""
    pairs = any(term.has_pairs for term in (*rule.operands, *rule.results))
    for factor, steps in extents.items():
        for mesh in _MESHES:
            for block, count in ((1, 1), (2, 1), (1, 2)):
                if steps % count or (count > 1 and pairs):
                    continue
                if min(chunk_sizes(steps // count, mesh.shape, block)):
                    yield mesh, {factor: Cut(("x",), block, count)}
        if min(chunk_sizes(steps, _SQUARE.shape, 1)):
            yield _SQUARE, {factor: Cut(("x", "y"))}
    for one, other in permutations(extents, 2):
        if min(extents[one], extents[other]) > 1:
            yield _SQUARE, {one: Cut(("x",)), other: Cut(("y",))}


def _wrong(
    rule: OperatorRule, operator: object, mesh: Mesh, cuts: Mapping[str, Cut], error: Exception
) -> RuleError:
    factors = " and ".join(map(repr, cuts))
    how = "".join(
        f", in {what}"
        for cut in cuts.values()
        for what, number in ((f"blocks of {cut.block} steps", cut.block), ("segments", cut.count))
        if number > 1
    )
    why = describe_error(error).removeprefix("AssertionError: ")
    return RuleError(
        f"Rule '{rule}' of operator {operator} is wrong: if {mesh.size} ranks shard factor "
        f"{factors}{how}, their results are not those of one device. Write '-' in place of "
        f"{factors}. ({one_line(why)})",
        name=" ".join(cuts),
        expected="the results of one device",
        got=one_line(why),
        remedy=f"write '-' in place of {factors}",
    )
