"""Operators that can have no declared rule are refused, with the reason."""

import pytest
import torch

import shardcore
from shardcore.domain.errors import ArgumentProblem

LIBRARY = torch.library.Library("refused_rules", "DEF")
LIBRARY.define("writes(Tensor(a!) x) -> ()")
LIBRARY.define("view(Tensor(a) x) -> Tensor(a)")
LIBRARY.define("joined(Tensor[] x) -> Tensor")
LIBRARY.define("optional(Tensor?[] x) -> Tensor")
LIBRARY.define("made(int n) -> Tensor")
LIBRARY.define("count(Tensor x) -> int")
LIBRARY.define("parts(Tensor x) -> Tensor[]")
LIBRARY.define("drawn(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
LIBRARY.define("composed(Tensor x) -> Tensor")
LIBRARY.impl("composed", lambda x: x + 1, "CompositeImplicitAutograd")
LIBRARY.define("good(Tensor x, Tensor? bias, int n=1) -> Tensor")

OF_SHARDCORE = "has a rule of shardcore, or is made of operators that have one"
REFUSED = {
    "writes": "writes into an operand",
    "view": "returns a view",
    "joined": "takes a list of tensors",
    "optional": "takes a list of tensors",
    "made": "takes no tensor",
    "count": "returns something else than tensors",
    "parts": "returns something else than tensors",
    "drawn": "draws random numbers",
    "tagged": OF_SHARDCORE,
    "composed": OF_SHARDCORE,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_can_have_no_rule_is_refused(name):
    operator = getattr(torch.ops.refused_rules, name).default
    with pytest.raises(ArgumentProblem, match=REFUSED[name]) as error:
        shardcore.operator_rule(operator, "n -> n")
    assert error.value.name == f"operator_rule(refused_rules.{name}.default)"


@pytest.mark.parametrize(
    "operator",
    [
        torch.ops.aten.mm.default,
        torch.ops.aten.add.Tensor,
        torch.ops.aten.matmul.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.detach.default,
    ],
)
def test_an_operator_with_a_rule_of_shardcore_is_refused(operator):
    with pytest.raises(ArgumentProblem, match=f"operator_rule.{operator}."):
        shardcore.operator_rule(operator, "n k, k m -> n m")


@pytest.mark.parametrize("operator", ["mylib::scale", torch.ops.refused_rules.good, torch.add])
def test_what_is_no_operator_is_refused(operator):
    with pytest.raises(ArgumentProblem, match=r"with its overload, such as torch\.ops"):
        shardcore.operator_rule(operator, "n -> n")


def test_an_operand_that_may_be_none_has_a_term():
    good = torch.ops.refused_rules.good.default
    with pytest.raises(ArgumentProblem, match=r"2 terms \(x, bias\) before the arrow"):
        shardcore.operator_rule(good, "n -> n")
    shardcore.operator_rule(good, "n, + n -> n")
