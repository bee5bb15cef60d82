"""Choosing a strategy: what plug-ins offer, what can be had, and the message when it cannot."""

import logging
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from shardcore import bootstrap
from shardcore.bootstrap import plugin_calls, plugins
from shardcore.domain.errors import EnvironmentProblem, StrategyError
from shardcore.ports.strategy import StrategyEntry
from shardcore.reporting import errors
from tests.plugins.packages import write_package

HEAD = """\
from shardcore.ports.hookspecs import hookimpl
from shardcore.ports.strategy import StrategyEntry
"""

OFFER = """
@hookimpl
def shardcore_strategies():
    return [StrategyEntry({name!r}, "An example.", open=lambda world: None)]
"""


def entry(name, preference=None, reason=None):
    return StrategyEntry(name, "An example.", lambda world: None, lambda: reason, preference)


def offers(*entries, broken=None):
    found = {each.name: each for each in entries}
    return plugins.Offers(plugins.STRATEGIES, found, broken or {})


# --- choosing -------------------------------------------------------------------------------------


def test_auto_takes_the_highest_preference_that_can_be_had():
    best, usual, last = entry("best", 9, "no such device."), entry("usual", 5), entry("last", 0)
    chosen, passed_over = plugins.choose("auto", offers(last, best, usual))
    assert chosen is usual
    assert passed_over == {"best": "no such device.", "last": "'usual' has precedence."}


def test_auto_never_takes_an_entry_without_preference():
    shy, last = entry("shy"), entry("last", 0)
    chosen, passed_over = plugins.choose("auto", offers(shy, last))
    assert chosen is last
    assert passed_over == {"shy": "chosen only by name."}


def test_a_name_goes_before_preferences():
    shy, best = entry("shy"), entry("best", 9)
    chosen, passed_over = plugins.choose("shy", offers(shy, best))
    assert chosen is shy
    assert passed_over == {"best": "'shy' was asked for."}


def test_no_such_strategy_lists_those_there_are():
    with pytest.raises(StrategyError) as error:
        plugins.choose("dtenser", offers(entry("dtensor", 1), entry("single", 0)))
    message = str(error.value)
    assert message.startswith("No strategy 'dtenser': there are 'dtensor', 'single', 'auto'.")
    assert "is it installed in this environment?" in message


def test_an_unavailable_strategy_gives_its_reason():
    reason = "It needs a torch that has it: pip install it."
    with pytest.raises(StrategyError, match=f"^Strategy 'far' cannot be used here: {reason}$"):
        plugins.choose("far", offers(entry("far", 1, reason), entry("single", 0)))


def test_an_entry_whose_check_fails_counts_as_unavailable():
    def fails():
        raise OSError("no driver")

    odd = StrategyEntry("odd", "An example.", lambda world: None, fails, preference=9)
    chosen, passed_over = plugins.choose("auto", offers(odd, entry("single", 0)))
    assert chosen.name == "single"
    assert passed_over == {"odd": "its why_unavailable() failed: OSError: no driver"}


# --- plug-ins -------------------------------------------------------------------------------------


def test_shardcore_offers_its_own_by_the_same_hook():
    found = plugins.load().strategies.entries
    assert {name: each.package for name, each in found.items()} == {
        "dtensor": "shardcore",
        "manual": "shardcore",
        "single": "shardcore",
    }


def test_an_installed_package_offers_a_strategy(packages):
    write_package(packages, "more-strategies", HEAD + OFFER.format(name="more"))
    offered = plugins.load().strategies
    assert offered.entries["more"].package == "more-strategies"
    assert offered.broken == {}
    assert plugins.choose("more", offered)[0].name == "more"


HOOK = "its hook shardcore_strategies() "
IMPORT = "the import of its plug-in 'broken_strategies' "


def hook(body):
    return HEAD + f"@hookimpl\ndef shardcore_strategies():\n    {body}"


def entry_with(**fields):
    given = "".join(f", {name}={value!r}" for name, value in fields.items())
    return hook(f"return [StrategyEntry('toy', 'An example.', open=print{given})]")


BROKEN = {
    "import": (
        "import a_library_that_is_not_there",
        IMPORT + "failed: ModuleNotFoundError: No module named 'a_library_that_is_not_there'",
    ),
    "exit at import": ("raise SystemExit(3)", IMPORT + "failed: SystemExit: 3"),
    "interrupt at import": ("raise KeyboardInterrupt", IMPORT + "failed: KeyboardInterrupt:"),
    # Short: the next import of a module of this name waits for the end of this one.
    "import that hangs": (
        "import time\ntime.sleep(2)",
        IMPORT + "has not returned after 1 seconds",
    ),
    "signature": (
        HEAD + "@hookimpl\ndef shardcore_strategies(world): return []",
        "Argument(s) {'world'} are declared in the hookimpl",
    ),
    "no list": (hook("return None"), HOOK + "failed: TypeError: 'NoneType' object is not iterable"),
    "no entry": (hook("return ['toy']"), HOOK + "gave 'toy', expected a StrategyEntry"),
    "no hook": (HEAD + "def shardcore_strategies(): return []", "are they marked with @hookimpl?"),
    "unknown hook": (
        HEAD + "@hookimpl\ndef shardcore_strategy(): return []",
        "those of the plug-in shardcore_strategy",
    ),
    "hook raises": (hook("1 / 0"), HOOK + "failed: ZeroDivisionError: division by zero"),
    "hook exits": (hook("raise SystemExit"), HOOK + "failed: SystemExit:"),
    "hook that hangs": (
        hook("import time; time.sleep(60)"),
        HOOK + "has not returned after 1 seconds",
    ),
    "preference": (
        entry_with(preference="high"),
        HOOK + "failed: PluginError: StrategyEntry(preference=...): expected int or None, got 'hi",
    ),
    "name": (
        hook("return [StrategyEntry('To y', 'An example.', open=print)]"),
        HOOK + "failed: PluginError: StrategyEntry(name=...): expected small letters, digits, ",
    ),
    "contract": (
        entry_with(contract=2),
        HOOK + "gave strategy 'toy' for version 2 of the contract, and this shardcore has version",
    ),
}


@pytest.fixture
def warned(caplog, monkeypatch):
    """The warnings that are logged."""
    monkeypatch.setattr(logging.getLogger("shardcore"), "propagate", True)
    with caplog.at_level("WARNING", logger="shardcore.install"):
        yield caplog


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_reported_once_and_breaks_no_other(packages, warned, monkeypatch, kind):
    source, said = BROKEN[kind]
    write_package(packages, "broken-strategies", source)
    write_package(packages, "more-strategies", HEAD + OFFER.format(name="more"))
    if "hang" in kind:  # the others may take their time on a busy machine
        monkeypatch.setattr(plugin_calls, "SECONDS", 1.0)
    loaded = plugins.load()
    loaded.log()
    offered = loaded.strategies

    assert {"dtensor", "manual", "single", "more"} == offered.entries.keys()
    ((package, reason),) = offered.broken.items()
    assert package == "broken-strategies"
    assert said in reason
    assert "\n" not in reason
    assert warned.messages == [f"package {package!r}: {reason}"]
    assert plugins.choose("single", offered)[1][package] == reason
    with pytest.raises(StrategyError, match=r"No strategy 'toy': .* package 'broken-strategies': "):
        plugins.choose("toy", offered)


def test_a_hook_that_fails_leaves_the_other_hook_alone(packages):
    source = HEAD + OFFER.format(name="more") + "@hookimpl\ndef shardcore_policies(): 1 / 0"
    write_package(packages, "more-of-both", source)
    loaded = plugins.load()
    assert loaded.strategies.entries["more"].package == "more-of-both"
    assert loaded.policies.broken["more-of-both"].startswith("its hook shardcore_policies() failed")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(1)", "its why_unavailable() failed: SystemExit: 1"),
        ("return 3", "its why_unavailable() gave 3, expected None or a reason"),
        ("import time; time.sleep(60)", "its why_unavailable() has not returned after 1 seconds"),
    ],
)
def test_a_check_of_availability_may_fail(packages, warned, monkeypatch, body, said):
    check = f"\ndef check():\n    {body}\n"
    offer = OFFER.format(name="more").replace("None)]", "None, why_unavailable=check)]")
    write_package(packages, "more-strategies", HEAD + check + offer)
    offered = plugins.load().strategies
    if "sleep" in body:
        monkeypatch.setattr(plugin_calls, "SECONDS", 1.0)
    assert plugins.choose("auto", offered)[1]["more"] == said
    assert warned.messages == [f"package 'more-strategies', strategy 'more': {said}"]


def test_a_hook_that_hangs_is_said_to_and_is_ended(packages, monkeypatch, capsys):
    body = "while True: time.sleep(0.01)"
    write_package(packages, "more-strategies", "import time\n" + hook(body))
    monkeypatch.setattr(plugin_calls, "SECONDS", 1.0)
    monkeypatch.setattr(errors, "WAIT_SECONDS", 0.2)
    before = set(threading.enumerate())
    plugins.load()
    said = (
        r"shardcore waits for package 'more-strategies': its hook shardcore_strategies\(\), at most"
    )
    assert re.match(rf"{said} until \d\d:\d\d:\d\d \(1 seconds", capsys.readouterr().err)
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, "its thread goes on"
        time.sleep(0.01)


def test_a_name_of_ours_stays_ours(packages):
    write_package(packages, "more-strategies", HEAD + OFFER.format(name="more"))
    write_package(packages, "greedy-strategies", HEAD + OFFER.format(name="single"))
    offered = plugins.load().strategies
    assert offered.entries["single"].package == "shardcore"
    assert offered.entries["more"].package == "more-strategies"
    assert offered.broken == {
        "greedy-strategies": "strategy 'single' is offered by package 'shardcore' and by package "
        "'greedy-strategies': uninstall one of the two, or rename its strategy."
    }
    chosen, passed_over = plugins.choose("single", offered)
    assert chosen.package == "shardcore"
    assert passed_over["greedy-strategies"] == offered.broken["greedy-strategies"]


def test_a_name_that_several_packages_take_is_refused_and_names_them(packages):
    for name in ("more-strategies", "greedy-strategies", "third-strategies"):
        write_package(packages, name, HEAD + OFFER.format(name="more"))
    write_package(packages, "other-strategies", HEAD + OFFER.format(name="other"))
    offered = plugins.load().strategies
    assert plugins.choose("other", offered)[0].package == "other-strategies"
    assert offered.broken.keys() == {"more-strategies", "greedy-strategies", "third-strategies"}
    with pytest.raises(StrategyError, match=r"^No strategy 'more': .*Or is it one of") as error:
        plugins.choose("more", offered)
    for package in offered.broken:
        assert f"package {package!r}: strategy 'more' is offered by " in str(error.value)


# --- the environment ------------------------------------------------------------------------------


@pytest.fixture
def no_keras_yet(monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)


@pytest.mark.usefixtures("no_keras_yet")
def test_another_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(EnvironmentProblem, match=r"backend is 'jax'.*KERAS_BACKEND=torch"):
        bootstrap.install("auto", {})
    assert not bootstrap.is_installed()


def test_keras_already_runs_on_another_backend(monkeypatch):
    backend = SimpleNamespace(backend=lambda: "numpy")
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(backend=backend))
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # too late
    with pytest.raises(EnvironmentProblem, match=r"is 'numpy': .* before Keras is imported"):
        bootstrap.install("auto", {})


def test_nothing_installed_says_what_to_call():
    with pytest.raises(EnvironmentProblem, match=r"call shardcore\.install\(\) first"):
        bootstrap.installation()
    bootstrap.uninstall()  # and this is no error
