"""Rules that users and plug-ins declare for their own operators, checked against a signature."""

from collections.abc import Collection

import attrs

from shardcore.domain.engine.rules.rule import OperatorRule, rule
from shardcore.domain.errors import ArgumentProblem, RuleError


@attrs.frozen
class OperatorSignature:
    """The tensors that an operator takes and returns, which a rule has to fit."""

    name: str  # such as "mylib.scale.default"
    operands: tuple[str, ...]  # the names of its tensor arguments, in order
    results: int  # the number of tensors that it returns

    @property
    def example(self) -> str:
        """A rule with as many operands and results.

        Example:
            >>> OperatorSignature("mylib.scale.default", ("x", "weight"), 1).example
            'n k, n k -> n k'
        """
        operands, results = (["n k"] * max(n, 1) for n in (len(self.operands), self.results))
        return f"{', '.join(operands)} -> {', '.join(results)}"

    def rule(self, text: object) -> OperatorRule:
        """Parses the rule that is declared for the operator.

        Raises:
            ArgumentProblem: If it is no rule, or has other numbers of operands or results.

        Example:
            >>> signature = OperatorSignature("mylib.scale.default", ("x", "weight"), 1)
            >>> str(signature.rule("n k, k -> n k"))
            'n k, k -> n k'
        """
        if not isinstance(text, str):
            raise self._problem(text, "a rule is a text")
        try:
            declared = rule(text)
        except RuleError as error:
            raise self._problem(text, str(error).rstrip(".")) from None
        numbers = len(declared.operands), len(declared.results)
        if numbers != (len(self.operands), self.results):
            raise self._problem(
                text, f"it has {numbers[0]} terms before the arrow and {numbers[1]} after it"
            )
        return declared

    def _problem(self, got: object, why: str) -> ArgumentProblem:
        return ArgumentProblem(
            name=f"operator_rule({self.name})",
            expected=f"a rule with {len(self.operands)} terms ({', '.join(self.operands)}) before "
            f"the arrow and {self.results} after it, such as {self.example!r},",
            got=repr(got),
            remedy=f"{why}. A letter is a dim that may be sharded, with all dims of that letter; "
            "one that no result has is summed; '-' is never sharded; '()' has no dims",
        )


def without_operands(declared: OperatorRule, absent: Collection[int]) -> OperatorRule:
    """Leaves out operands that a call lacks, by number.

    Raises:
        RuleError: If a result has a factor of these alone.

    Example:
        >>> str(without_operands(rule("n k, k m, + m -> n m"), {2}))
        'n k, k m -> n m'
    """
    operands = tuple(
        operand for number, operand in enumerate(declared.operands) if number not in absent
    )
    return attrs.evolve(declared, operands=operands)
