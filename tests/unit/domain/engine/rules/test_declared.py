"""The texts of declared rules, and what is said of a wrong one."""

import pytest

from shardcore.domain.engine.rules.declared import OperatorSignature, without_operands
from shardcore.domain.engine.rules.rule import rule
from shardcore.domain.errors import ArgumentProblem, RuleError

SCALE = OperatorSignature("mylib.scale.default", ("x", "weight"), 1)
SPLIT = OperatorSignature("mylib.split.default", ("x",), 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n k -> n k", "it has 1 terms before the arrow and 1 after it"),
        ("n k, k", "it has 2 terms before the arrow and 0 after it"),
        ("n k, k -> n k, k", "it has 2 terms before the arrow and 2 after it"),
        ("", "needs an operand before the arrow"),
        ("N K, K -> N K", "a factor such as 'n'"),
        ("n k, k => n k", "got '=>'"),
        ("n n, n -> n n", "There is a factor twice in 'n n'"),
        ("n k, k -> n m", "which none of the operands"),
        (None, "a rule is a text"),
    ],
)
def test_a_wrong_text_says_what_was_expected(text, why):
    with pytest.raises(ArgumentProblem) as error:
        SCALE.rule(text)
    message = str(error.value)
    assert error.value.name == "operator_rule(mylib.scale.default)"
    assert "a rule with 2 terms (x, weight) before the arrow and 1 after it, such as" in message
    assert "'n k, n k -> n k'" in message
    assert f"got {text!r}" in message
    assert why in message


def test_the_example_of_an_error_is_a_rule_for_the_operator():
    for signature in (SCALE, SPLIT):
        assert str(signature.rule(signature.example)) == signature.example


def test_an_operand_that_a_call_lacks_has_no_term():
    linear = rule("n k, k m, + m -> n m")
    assert str(without_operands(linear, {2})) == "n k, k m -> n m"
    assert without_operands(linear, set()) == linear
    with pytest.raises(RuleError, match=r"has \['m'\]"):
        without_operands(linear, {1, 2})
