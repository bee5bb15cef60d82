import re
from pathlib import Path

import pytest

from shardcore.domain.engine.rules import basic, layers, lookups, movement
from shardcore.domain.engine.rules.rule import Operand, OperatorRule, Result
from shardcore.domain.errors import RuleError
from tests.unit.domain.engine.rules.proof import names_of_rules

DOCS = Path(__file__).parents[5] / "docs" / "reference" / "operators.md"
ONE_GROUP = layers.Channels(1, 4, 6, transposed=False)
CONVOLUTION = layers.convolution(ONE_GROUP, 2, bias=True)
EXAMPLES = {
    "convolution": CONVOLUTION,
    "convolution, transposed": layers.convolution(
        layers.Channels(1, 4, 6, transposed=True), 2, bias=False
    ),
    "convolution, in groups of 2 and 3 channels": layers.convolution(
        layers.Channels(4, 2, 3, transposed=False), 2, bias=False
    ),
    "convolution_backward": layers.convolution_backward(ONE_GROUP, 2),
    "along": basic.along(3, frozenset({1})),
    "pool, windows of 2 by 3": layers.pool(4, (2, 3), (False,)),
    "unbind": movement.permute(3, (0, 2), results=2),
    "index": lookups.index(4, first=1, indexed=2, index_dims=1),
    "index_put, added up": lookups.index_put(2, indexed=1, accumulates=True),
    "index_put": lookups.index_put(2, indexed=1, accumulates=False),
    "im2col": layers.im2col(batched=True, window=9),
    "col2im": layers.col2im(batched=True, window=9),
    "attention": layers.attention("b h", "b - q"),
    "attention_backward": layers.attention_backward("b h", None),
    "recurrent, with cells": layers.recurrent(True, (2, 2, 1, 1), cells=True),
    "recurrent_backward, of the output alone": layers.recurrent_backward(
        True, (2, 2, 1, 1), cells=False, gradients=(True, False, False), kept=2
    ),
}


def test_malformed_rules_are_refused():
    with pytest.raises(RuleError, match="got 'N'"):
        Operand("N c")
    for text in ("*g", "3*", "a*-", "a*b*c"):
        with pytest.raises(RuleError, match=re.escape(f"got {text!r}")):
            Operand(text)
    for text in ("n n", "n*m n", "n*n"):
        with pytest.raises(RuleError, match=re.escape(f"factor twice in '{text}'")):
            Operand(text)
    with pytest.raises(RuleError, match="needs an operand"):
        OperatorRule((), (Result("n"),))
    x = Operand("n c")
    with pytest.raises(RuleError, match=r"has \['o'\], which none"):
        OperatorRule((x,), (Result("n o"),))
    with pytest.raises(RuleError, match=r"has \['c'\], which none"):
        OperatorRule((Operand("n"), x), (Result("n c", of=(0,)),))
    with pytest.raises(RuleError, match=r"added to 'n', which lacks \['c'\]"):
        OperatorRule((x, Operand("c", added=True)), (Result("n"),))


def test_the_documentation_has_every_rule():
    rows = [
        "| {} | `{}` | `{}` |".format(name, *str(rule).split(" -> "))
        for name, rule in EXAMPLES.items()
    ]
    wanted = "\n".join(["| rule | operands | results |", "|---|---|---|", *rows])
    assert wanted in DOCS.read_text(), f"{DOCS} should have this table:\n{wanted}"
    assert names_of_rules(layers) <= {name.partition(",")[0] for name in EXAMPLES}
