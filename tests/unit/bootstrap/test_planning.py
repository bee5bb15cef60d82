"""Runs policies: which exist, the options that they take, and the plans that they return."""

import pytest

from shardcore.bootstrap import planning, plugins
from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.policy import LayerFacts, VariableFacts
from tests.plugins.packages import write_package

MESH = Mesh((2, 2), ("data", "model"))
KERNEL = VariableFacts("dense/kernel", (4, 8))
MODEL = LayerFacts("model", ("Model",), variables=(KERNEL,))

HEAD = """\
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.policy import Choice, PolicyEntry
from shardcore.ports.strategy import StrategyEntry
"""

OFFER = """
def plan(model, mesh, *, axis="model"):
    return {variable.path: %s for variable in model.all_variables()}

@hookimpl
def shardcore_policies():
    return [PolicyEntry(%r, "An example.", plan)]
"""

COLUMNS = 'Choice((None, axis), "columns")'


def run(policy, **options):
    return [(rule.key, rule.spec) for rule in planning.plan(policy, MODEL, MESH, options).rules]


def test_shardcore_offers_its_own_by_the_same_hook():
    found = plugins.load().policies.entries
    assert {"data_parallel", "fully_sharded", "tensor_parallel"} <= found.keys()
    assert found["fully_sharded"].package == "shardcore"
    assert run("fully_sharded", small=0) == [("dense/kernel", (None, "data"))]


def test_a_package_s_policy_is_found_with_its_options(packages):
    write_package(packages, "more-policies", HEAD + OFFER % (COLUMNS, "more"))
    assert run("more") == [("dense/kernel", (None, "model"))]
    assert run("more", axis="data") == [("dense/kernel", (None, "data"))]


def test_a_policy_that_is_not_there():
    with pytest.raises(PolicyError) as error:
        run("tensor_paralel")
    assert str(error.value).startswith(
        "No policy 'tensor_paralel': there are 'data_parallel', 'fully_sharded', 'hybrid_sharded', "
        "'tensor_parallel'"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"small": "abc"}, "Option 'small' of policy 'fully_sharded': expected int, got 'abc'"),
        ({"axis": 1}, "Option 'axis' of policy 'fully_sharded': expected str or NoneType, got 1"),
    ],
)
def test_an_option_of_another_type(options, said):
    with pytest.raises(PolicyError, match=said):
        run("fully_sharded", **options)


def test_an_option_that_is_not_there():
    with pytest.raises(
        PolicyError, match="'fully_sharded' has no option 'smal'; it has axis, small"
    ):
        run("fully_sharded", smal=0)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("1 / 0", "it failed with ZeroDivisionError: division by zero"),
        ("(None, axis)", r"gave \(None, 'model'\) for 'dense/kernel', expected a Choice"),
        ('Choice((axis,), "")', r"its choice for 'dense/kernel' of shape \(4, 8\) does not fit"),
    ],
)
def test_what_a_package_s_policy_does_wrong_names_the_package(packages, choice, message):
    write_package(packages, "odd-policies", HEAD + OFFER % (choice, "odd"))
    with pytest.raises(PolicyError, match=f"^Policy 'odd' of package 'odd-policies': .*{message}"):
        run("odd")


def test_a_policy_that_gives_no_mapping(packages):
    source = HEAD + (OFFER % (COLUMNS, "odd")).replace("return {", "return [").replace("}\n", "]\n")
    write_package(packages, "odd-policies", source.replace("variable.path: ", ""))
    with pytest.raises(PolicyError, match=r"'odd-policies': it gave \[.*expected a mapping"):
        run("odd")


def test_no_package_takes_a_builtin_name_and_a_name_that_two_take_is_refused(packages):
    for package, name in {"a-": "fully_sharded", "b-": "more", "c-": "more"}.items():
        write_package(packages, f"{package}policies", HEAD + OFFER % (COLUMNS, name))
    assert run("fully_sharded", small=0) == [("dense/kernel", (None, "data"))]
    with pytest.raises(
        PolicyError, match=r"No policy 'more': .*policy 'more' is offered by"
    ) as error:
        run("more")
    for package in ("a-policies", "b-policies", "c-policies"):
        assert f"package {package!r}" in str(error.value)


BROKEN = {
    "import": "import a_library_that_is_not_there",
    "signature": HEAD + "@hookimpl\ndef shardcore_policies(model): return []",
    "result": HEAD + "@hookimpl\ndef shardcore_policies(): return ['broken']",
    "raises": HEAD + "@hookimpl\ndef shardcore_policies(): 1 / 0",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_breaks_no_other(packages, kind):
    write_package(packages, "broken-policies", BROKEN[kind])
    write_package(packages, "more-policies", HEAD + OFFER % (COLUMNS, "more"))
    assert run("more") == [("dense/kernel", (None, "model"))]
    with pytest.raises(PolicyError, match=r"No policy 'broken': .* package 'broken-policies': "):
        run("broken")


def test_a_package_may_offer_strategies_and_policies(packages):
    strategies = """
@hookimpl
def shardcore_strategies():
    return [StrategyEntry("more", "An example.", open=lambda world: None)]
"""
    write_package(packages, "more-of-both", HEAD + strategies + OFFER % (COLUMNS, "more"))
    assert plugins.load().strategies.entries["more"].package == "more-of-both"
    assert plugins.load().policies.entries["more"].package == "more-of-both"
