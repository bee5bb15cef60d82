"""From choices to the rules of a layout map."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.policies.rules import complete, rules
from shardcore.ports.policy import Choice, LayerFacts, VariableFacts

MESH = Mesh((2, 2), ("data", "model"))
SHARDED, REPLICATED = Choice(("model",), "sharded"), Choice((None,), "replicated")


def keys(**choices):
    return {rule.key: rule.spec for rule in rules(choices)}


def test_blocks_that_are_alike_share_a_rule():
    assert [rule.key for rule in rules({"b_0/w": SHARDED, "b_1/w": SHARDED, "c/w": SHARDED})] == [
        r"b_\d+/w",
        "c/w",
    ]


def test_blocks_that_differ_do_not():
    assert {rule.key for rule in rules({"b_0/w": SHARDED, "b_1/w": REPLICATED})} == {
        "b_0/w",
        "b_1/w",
    }


def test_a_number_that_is_the_same_in_all_stays():
    chosen = {"m_3/b_0/w": SHARDED, "m_3/b_1/w": SHARDED}
    (rule,) = rules(chosen)
    assert rule.key == r"m_3/b_\d+/w"


def test_a_rule_lists_all_its_reasons():
    (rule,) = rules({"b_0/w": Choice((None,), "one"), "b_1/w": Choice((None,), "two")})
    assert rule.reason == "one; two"


# Names as people and Keras make them, numbers and characters of regular expressions among them.
names = st.tuples(
    st.sampled_from(["a", "b", "a(", "a.b", "+", "a-1"]),
    st.sampled_from(["", "_", "_0", "_1", "_12", "_1_0", "_1_2", "2d_1"]),
).map("".join)
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: "/".join([*parts, "w"]))
chosen = st.dictionaries(paths, st.sampled_from([SHARDED, REPLICATED]), max_size=12)


@given(chosen)
def test_every_path_gets_its_own_choice_back(choices):
    # A dot and a slash are one to the rules: two paths that differ in them alone are ambiguous.
    slashed = {path.replace(".", "/"): path for path in choices}
    choices = {path: choices[path] for path in slashed.values()}
    matcher = PathRules({rule.key: rule.spec for rule in rules(choices)})
    found = {path: matcher.match(path) for path in choices}
    assert {path: match and match.value for path, match in found.items()} == {
        path: choice.spec for path, choice in choices.items()
    }
    assert matcher.report(choices).unused_rules == ()


def test_a_rule_matches_no_path_without_a_choice():
    # Keras counts the layers of blocks on: each second one ends a pair.
    outputs = [f"block_{number // 2}/dense_{number}/output" for number in range(6)]
    choices = dict.fromkeys(outputs[1::2], SHARDED)
    matcher = PathRules({rule.key: rule.spec for rule in rules(choices, outputs)})
    assert [path for path in outputs if matcher.match(path)] == outputs[1::2]
    shared = rules(choices)  # if the others have no outputs
    assert [rule.key for rule in shared] == [r"block_\d+/dense_\d+/output"]


# --- what a policy may give -----------------------------------------------------------------------

VARIABLES = (VariableFacts("k", (4, 8)), VariableFacts("b", (8,)))


def model(*variables):
    add = LayerFacts("add", ("Add",))
    return LayerFacts("a", ("Block",), variables=variables or VARIABLES, children=(add,), path="a")


def test_a_variable_that_the_policy_leaves_out_is_replicated():
    found = complete({"b": SHARDED}, model(), MESH)
    assert found == {"k": Choice((None, None), "replicated: left out by the policy"), "b": SHARDED}


def test_a_path_of_several_shapes_gets_no_rule():
    variables = [*VARIABLES, VariableFacts("twice", (4,)), VariableFacts("twice", (4, 8))]
    assert complete({"twice": SHARDED}, model(*variables), MESH).keys() == {"k", "b"}
    alike = [*VARIABLES, VariableFacts("twice", (4,)), VariableFacts("twice", (4,))]
    assert complete({"twice": SHARDED}, model(*alike), MESH)["twice"] == SHARDED


def test_an_output_has_a_rule_where_it_is_chosen():
    tokens = Choice(("data", "model", None), "parts of the sequence")
    assert complete({"a/output": tokens}, model(), MESH)["a/output"] == tokens
    assert complete({}, model(), MESH).keys() == {"k", "b"}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"c": SHARDED}, "for 'c', which is no variable of the model, and no layer's path with"),
        ({"add/output": SHARDED}, "for 'add/output', which is no variable"),  # an operation's
        ({"": SHARDED}, "for '', which is no variable"),
        ({"a/output": Choice(("expert", None), "")}, "its choice for 'a/output' does not fit"),
        ({"a/output": ("data", None)}, "gave ('data', None) for 'a/output', expected a Choice"),
        ({"b": ("model",)}, "gave ('model',) for 'b', expected a Choice"),
        ({"k": SHARDED}, "its choice for 'k' of shape (4, 8) does not fit: It has shape"),
        ({"b": Choice(("expert",), "")}, "names axis 'expert', but the axes of its mesh are"),
        ({"k": Choice(("model", "model"), "")}, "uses axis 'model' twice"),
    ],
)
def test_a_choice_that_does_not_fit_its_variable_is_refused(choices, message):
    with pytest.raises(PolicyError) as error:
        complete(choices, model(), MESH)
    assert message in str(error.value)
