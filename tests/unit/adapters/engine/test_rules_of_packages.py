"""The sharding rules that packages offer are declared by `install()`."""

import logging
import sys

import pytest
import torch

import shardcore
from shardcore import bootstrap
from shardcore.adapters.engine.declared import rules
from tests.plugins.packages import write_package

SOURCE = """
from shardcore.ports.hookspecs import hookimpl

@hookimpl
def shardcore_operator_rules():
    import torch
    library = torch.library.Library({name!r}, "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    globals()["library"] = library
    return [(torch.ops.{name}.twice.default, {text!r})]
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_the_rules_of_a_package_are_declared_by_install(packages):
    write_package(packages, "offers-rules", SOURCE.format(name="offers_rules", text="n k -> n k"))
    status = shardcore.install("single")
    try:
        assert str(rules.find(torch.ops.offers_rules.twice.default)) == "n k -> n k"
        assert "offers-rules" not in status.passed_over
    finally:
        shardcore.uninstall()


def test_a_wrong_rule_of_a_package_is_passed_over_with_a_warning(packages, caplog):
    write_package(packages, "wrong-rules", SOURCE.format(name="wrong_rules", text="n k ->"))
    with caplog.at_level(logging.WARNING, logger="shardcore"):
        bootstrap.install("single", {})
    try:
        reason = bootstrap.installation().passed_over["wrong-rules"]
    finally:
        shardcore.uninstall()
    assert "wrong_rules.twice.default" in reason
    assert "got 'n k ->'" in reason
    assert rules.find(torch.ops.wrong_rules.twice.default) is None
