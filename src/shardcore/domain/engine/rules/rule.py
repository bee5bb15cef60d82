"""Sharding rules: the dims of an operator's operands and results that are sharded together.

A rule reads like an einsum. In "n c - -, o c - - -> n o - -" the letters are **factors**: all dims
of one factor are sharded together. "-" is a dim that is never sharded. A factor of the operands
that a result lacks is summed, so that its sharding leaves the result partial. "3g" is a dim of
three elements for each step of the factor `g`, and is sharded between these threes only. "5*g" is a
dim of five segments, each of which has all steps of the factor. "a*g" has a segment for each step
of another factor, which is sharded too (ADR 13, ADR 50).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from math import prod

import attrs

from shardcore.domain.errors import RuleError
from shardcore.domain.layouts.placements import ReduceOp

Shape = tuple[int, ...]

_DIM = re.compile(
    r"((?=[^*])(?P<count>[1-9][0-9]*)?(?P<outer>[a-z][0-9]*)?\*)?"
    r"(?P<block>[1-9][0-9]*)?(?P<factor>[a-z][0-9]*)|-"
)


@attrs.frozen
class Dim:
    """One dim of an operand or a result."""

    factor: str | None = None  # its factor, None for a dim that is never sharded
    block: int = 1  # the number of elements for each step of the factor
    count: int = 1  # the number of segments, each with all steps of the factor
    outer: str | None = None  # a factor outside: the segments repeat for each of its steps

    def __str__(self) -> str:
        if self.factor is None:
            return "-"
        segments = f"{'' if self.count == 1 else self.count}{self.outer or ''}"
        return f"{segments and segments + '*'}{'' if self.block == 1 else self.block}{self.factor}"

    @property
    def factors(self) -> tuple[str, ...]:
        """Its factors, the outer one first."""
        return tuple(factor for factor in (self.outer, self.factor) if factor)

    @property
    def step(self) -> int:
        """The number of elements for each step of its factors, over all segments."""
        return self.block * self.count

    def size(self, extents: Mapping[str, int]) -> int:
        """Counts the elements, of factors with so many steps."""
        return self.step * prod(extents[factor] for factor in self.factors)


def _dims(text: str) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for word in () if text.strip() == "()" else text.split():
        match = _DIM.fullmatch(word)
        if match is None:
            raise RuleError(
                "A dim of a rule is '-', a factor such as 'n' or 'd0', a factor in blocks such as "
                f"'3g', or in segments such as '5*g' or 'a*g', got {word!r}.",
                got=repr(word),
            )
        block, count = int(match["block"] or 1), int(match["count"] or 1)
        dims.append(Dim(match["factor"], block, count, match["outer"]))
    return tuple(dims)


@attrs.frozen
class Term:
    """An operand or a result, by its dims as text such as "n c - -".

    Raises:
        RuleError: If a dim is malformed, or a factor occurs twice.
    """

    dims: tuple[Dim, ...] = attrs.field(converter=_dims)

    def __attrs_post_init__(self) -> None:
        factors = [factor for dim in self.dims for factor in dim.factors]
        if len(factors) > len(set(factors)):
            raise RuleError(f"There is a factor twice in '{self}': use each factor once.")

    @cached_property
    def factors(self) -> frozenset[str]:
        """The factors that it can be sharded by."""
        return frozenset(factor for dim in self.dims for factor in dim.factors)

    @cached_property
    def has_pairs(self) -> bool:
        """Whether a dim has two factors."""
        return any(dim.outer for dim in self.dims)

    def dim_of(self, factor: str) -> int:
        """The number of the dim that has `factor`."""
        return next(number for number, dim in enumerate(self.dims) if factor in dim.factors)

    def dims_without(self, factors: frozenset[str]) -> str:
        """Writes its dims as text, with "-" for those of `factors`."""
        kept = (dim if factors.isdisjoint(dim.factors) else Dim() for dim in self.dims)
        return " ".join(map(str, kept)) or "()"

    def __str__(self) -> str:
        return " ".join(map(str, self.dims)) or "()"


@attrs.frozen
class Operand(Term):
    """A tensor that the operator reads."""

    # Whether it is added to the result, as a bias is. To a partial result, one rank adds it.
    added: bool = False

    def __str__(self) -> str:
        return f"+ {super().__str__()}" if self.added else super().__str__()


@attrs.frozen
class Result(Term):
    """A tensor that the operator returns."""

    # The operands, by number, of which it is a product; all that are not added, if empty. A factor
    # that it lacks is summed if one of them has it.
    of: tuple[int, ...] = ()
    # The operand, by number, whose layout it should get, as a gradient does.
    like: int | None = None
    op: ReduceOp = "sum"  # the reduction of partial results along a factor that it lacks


@attrs.frozen(cache_hash=True)
class OperatorRule:
    """Operands and results of an operator, by factors.

    Raises:
        RuleError: If there is no operand, a result has a factor that none of its operands has, or
            an added operand has one that the result lacks.

    Example:
        >>> product = OperatorRule((Operand("n c"), Operand("c o")), (Result("n o"),))
        >>> str(product), sorted(product.sums(product.results[0]))
        ('n c, c o -> n o', ['c'])
    """

    operands: tuple[Operand, ...]  # its operands, in the order of its arguments
    results: tuple[Result, ...]  # its results, in order

    def __attrs_post_init__(self) -> None:
        if not self.operands:
            raise RuleError(
                f"Rule '{self}' needs an operand before the arrow, such as 'n c' in 'n c -> n c'."
            )
        for result in self.results:
            new = result.factors - self._factors_of(result)
            if new:
                raise RuleError(
                    f"Result '{result}' of rule '{self}' has {sorted(new)}, which none of the "
                    "operands that it is a product of has: write '-' for a dim that is not sharded."
                )
            for operand in self.operands:
                if operand.added and not operand.factors <= result.factors:
                    raise RuleError(
                        f"Operand '{operand}' of rule '{self}' is added to '{result}', which "
                        f"lacks {sorted(operand.factors - result.factors)}: an added operand has "
                        "factors of the result only, and '-' for other dims."
                    )

    def sums(self, result: Result) -> frozenset[str]:
        """The factors that `result` lacks: they are summed, and leave it partial if sharded."""
        return self._factors_of(result) - result.factors

    def without(self, factors: frozenset[str]) -> "OperatorRule":
        """Replaces `factors` by dims that are never sharded.

        Example:
            >>> str(rule("b q, b k -> b q").without(frozenset("qk")))
            'b -, b - -> b -'
        """
        return OperatorRule(
            tuple(
                attrs.evolve(operand, dims=operand.dims_without(factors))
                for operand in self.operands
            ),
            tuple(
                attrs.evolve(result, dims=result.dims_without(factors)) for result in self.results
            ),
        )

    def _factors_of(self, result: Result) -> frozenset[str]:
        operands = [self.operands[number] for number in result.of]
        operands = operands or [operand for operand in self.operands if not operand.added]
        return frozenset[str]().union(*(operand.factors for operand in operands))

    def __str__(self) -> str:
        operands, results = (", ".join(map(str, terms)) for terms in (self.operands, self.results))
        return f"{operands} -> {results}"


@lru_cache(maxsize=4096)
def rule(
    text: str,
    of: tuple[tuple[int, ...], ...] = (),
    like: tuple[int | None, ...] = (),
    op: ReduceOp = "sum",
) -> OperatorRule:
    """Parses a rule; "()" is a tensor without dims, "+" marks an added operand.

    `of` and `like` have those attributes of each `Result`.

    Example:
        >>> bias = rule("n k, k m, + m -> n m").operands[2]
        >>> bias.added, str(bias)
        (True, '+ m')
    """
    operand_terms, _, result_terms = text.partition("->")
    operands = (
        Operand(term.removeprefix("+"), added=term.startswith("+"))
        for term in _terms(operand_terms)
    )
    results = (
        Result(dims, parents or (), model, op)
        for dims, parents, model in zip_longest(_terms(result_terms), of, like)
    )
    return OperatorRule(tuple(operands), tuple(results))


def _terms(text: str) -> list[str]:
    return [term.strip() for term in text.split(",")] if text.strip() else []


def rule_of(operands: Iterable[Iterable[str]], results: Iterable[Iterable[str]]) -> OperatorRule:
    """Joins a rule of operands and results whose dims are given one by one.

    Example:
        >>> str(rule_of([["a", "-"], []], [["a"]]))
        'a -, () -> a'
    """
    operand_terms, result_terms = (
        ", ".join(" ".join(dims) or "()" for dims in terms) for terms in (operands, results)
    )
    return rule(f"{operand_terms} -> {result_terms}")


def letters(ndim: int) -> list[str]:
    """Names the factors that stand for the dims of a tensor: a, b, c, ..."""
    return [chr(ord("a") + dim) if dim < 26 else f"d{dim}" for dim in range(ndim)]


def fits(shape: Shape, target: Shape) -> bool:
    """Tells whether a tensor of `shape` is broadcast to `target`, as one that is written there.

    Example:
        >>> fits((1, 6), (4, 6)), fits((3,), (4, 6)), fits((4, 6), (6,))
        (True, False, False)
    """
    meets = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, full) for size, full in meets)


def have_common_shape(shapes: Sequence[Shape]) -> bool:
    """Tells whether tensors of these shapes are broadcast to one shape.

    Example:
        >>> have_common_shape([(4, 1), (6,)]), have_common_shape([(4, 6), (4, 3)])
        (True, False)
    """
    columns = zip_longest(*map(reversed, shapes), fillvalue=1)
    return all(len({*column, 1}) <= 2 for column in columns)
