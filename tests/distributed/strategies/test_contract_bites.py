"""Each promise of the contract suite is broken by a strategy, and its test says so."""

import inspect
import sys
from pathlib import Path

import pytest

from shardcore.testing import RankFailed, StrategyContract
from shardcore.testing.contract import failing
from tests import warm
from tests.plugins.packages import write_package

SOURCE = (Path(__file__).parents[2] / "plugins" / "broken_strategies.py").read_text()

# By the name of the test: a strategy that breaks its promise, and the error that says so.
FAULTS = {
    "a_variable_is_created_as_its_layout_says": ("createsfloats", "torch.float32 is not torch.int"),
    "a_rank_stores_its_part_and_nothing_else": ("storeswhole", "got a storage of 384"),
    "a_tensor_knows_its_layout": ("forgetslayout", "layout() says (None, None)"),
    "a_variable_is_read_whole_on_every_rank": ("readsitspart", "computed with (None, None)"),
    "a_variable_is_assigned_in_place_on_every_rank": ("assignsonrank0", "what this rank stores"),
    "uneven_dims_fall_as_the_layout_says": ("losestherest", "what this rank stores of a tensor"),
    "parts_are_joined_without_being_moved": ("joinszeros", "what this rank stores of a tensor"),
    "an_activation_is_brought_into_a_layout": ("leavessumspending", "what this rank stores"),
    "what_one_rank_can_do_alone_starts_no_collective": ("askstheothers", "moved {'all_gather"),
    "one_rank_keeps_every_promise": ("attachedone", "full_tensor() gives a detached tensor"),
    "four_ranks_keep_every_promise": ("keepsthefirstaxis", "what this rank stores of a tensor"),
    "one_rank_gives_the_numbers_of_plain_keras": ("forgetfulone", "rank 0: "),
    "data_parallel_gives_the_numbers_of_one_device": ("averagesgradients", "rank 0: losses"),
    "model_parallel_gives_the_numbers_of_one_device": ("averagessums", "rank 0: losses"),
    "both_at_once_give_the_numbers_of_one_device": ("keepsthefirstaxis", "stores a part of shape"),
    "a_gradient_arrives_in_the_layout_of_its_variable": (
        "leavesgradientspending",
        "has a sum pending: redistribute_gradients() must reduce it",
    ),
    "a_file_is_that_of_one_device": ("assignsownkindonly", "rank 0, next loss: on the mesh"),
    "a_failing_rank_ends_all_with_its_error_first": ("hideserrors", "rank 1 must print its err"),
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """The broken strategies are installed, as a package; programs are forked from this process."""
    monkeypatch.setattr(failing, "_start", warm.Program)
    write_package(tmp_path, "broken-strategies", SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("broken_strategies", None)


def test_every_promise_is_broken_by_a_strategy():
    tests = [name for name, _ in inspect.getmembers(StrategyContract) if name.startswith("test_")]
    assert tests == sorted(f"test_{name}" for name in FAULTS)


@pytest.mark.parametrize("promise", FAULTS)
def test_a_broken_promise_fails_its_test(promise, broken):
    name, message = FAULTS[promise]
    contract = type("Broken", (StrategyContract,), {"strategy": name})()
    test = getattr(contract, f"test_{promise}")
    arguments = [broken] if inspect.signature(test).parameters else []
    with pytest.raises((AssertionError, RankFailed)) as failure:
        test(*arguments)
    assert message in str(failure.value)


def test_a_strategy_of_one_device_must_refuse_several(broken):
    contract = type("Greedy", (StrategyContract,), {"strategy": "openedonseveral"})
    contract.several_ranks = False
    with pytest.raises(AssertionError, match=r"mesh \(data=1, model=2\) must raise .* was opened"):
        contract().test_a_variable_is_created_as_its_layout_says()
