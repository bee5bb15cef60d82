from pathlib import Path

import pytest

from shardcore.domain import operator_rules_basic as basic
from shardcore.domain import operator_rules_table as table
from shardcore.domain.errors import RuleError
from shardcore.domain.operator_rules import Operand, OperatorRule, Result
from tests.unit.domain.rule_proof import names_of_rules

DOCS = Path(__file__).parents[3] / "docs" / "operators.md"
ONE_GROUP = table.Channels(1, 4, 6, transposed=False)
CONVOLUTION = table.convolution(ONE_GROUP, 2, bias=True)
EXAMPLES = {
    "convolution": CONVOLUTION,
    "convolution, transposed": table.convolution(
        table.Channels(1, 4, 6, transposed=True), 2, bias=False
    ),
    "convolution, in groups of 2 and 3 channels": table.convolution(
        table.Channels(4, 2, 3, transposed=False), 2, bias=False
    ),
    "convolution_backward": table.convolution_backward(ONE_GROUP, 2),
    "along": basic.along(3, frozenset({1})),
    "pool, windows of 2 by 3": table.pool(4, (2, 3), (False,)),
    "unbind": basic.dims_moved(3, (0, 2), results=2),
    "index": basic.index(4, first=1, indexed=2, found=1),
    "index_put, added up": basic.index_put(2, indexed=1, accumulates=True),
    "index_put": basic.index_put(2, indexed=1, accumulates=False),
    "whole": table.whole((2, 1, 1), 2),
    "im2col": table.im2col(batched=True, window=9),
    "col2im": table.col2im(batched=True, window=9),
    "attention": table.attention("b h", "b -"),
    "attention_backward": table.attention_backward("b h", None),
}


def test_what_cannot_be_a_rule():
    with pytest.raises(RuleError, match="got 'N'"):
        Operand("x", "N c")
    with pytest.raises(RuleError, match="factor twice in 'n n'"):
        Operand("x", "n n")
    x, y = Operand("x", "n c"), Result("y", "n c")
    with pytest.raises(RuleError, match="different names"):
        OperatorRule((x, x), (y,))
    with pytest.raises(RuleError, match=r"names \['z'\]: no such operand"):
        OperatorRule((x,), (Result("y", "n c", of=("z",)),))
    with pytest.raises(RuleError, match=r"has \['o'\], which none"):
        OperatorRule((x,), (Result("y", "n o"),))
    with pytest.raises(RuleError, match=r"added to 'y', which lacks \['c'\]"):
        OperatorRule((x, Operand("b", "c", added=True)), (Result("y", "n"),))


def test_the_documentation_has_every_rule():
    rows = [
        "| {} | `{}` | `{}` |".format(name, *str(rule).split(" -> "))
        for name, rule in EXAMPLES.items()
    ]
    wanted = "\n".join(["| rule | operands | results |", "|---|---|---|", *rows])
    assert wanted in DOCS.read_text(), f"docs/operators.md should have this table:\n{wanted}"
    assert names_of_rules(table) <= {name.partition(",")[0] for name in EXAMPLES}
