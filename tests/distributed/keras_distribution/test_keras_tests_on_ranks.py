"""A sample of `make keras-tests`: the tests of Keras itself over two ranks."""

import functools
import textwrap

import pytest

from tests.keras_tests import running
from tests.keras_tests.variants import prepare

pytestmark = pytest.mark.skipif(
    not running.files(["losses"]),
    reason="the wheel of this Keras has no tests: make compat adds them",
)


@pytest.mark.parametrize(
    ("variant", "file", "fewest"),
    [
        ("variables sharded", "layers/normalization/batch_normalization_test.py", 5),
        ("data parallel", "layers/normalization/layer_normalization_test.py", 5),
        ("inputs: pending sums", "ops/core_test.py", 60),
        ("inputs: a dim each", "ops/einops_test.py", 7),
        ("manual", "layers/core/embedding_test.py", 20),
        ("installed", "optimizers/adam_test.py", 5),
    ],
)
def test_pass_in_each_variant(variant, file, fewest):
    outcome_of = running.outcomes_on_ranks(file, functools.partial(prepare, variant))
    others = {name: outcome for name, outcome in outcome_of.items() if outcome != "skipped"}
    assert len(others) >= fewest
    assert set(others.values()) == {"passed"}, others


OWN = """
    import os
    import keras
    import torch.distributed

    RANK = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def test_before(): pass
    def test_on_rank_1(): assert RANK == 0, "not on this rank"
    def test_refused(): refuse()
    def test_alone():
        if RANK == 0:
            os._exit(3)
    def test_after(): pass

    def refuse():
        import shardcore
        shardcore.distribute_tensor([1.0], ("absent",))
"""


def test_a_test_that_fails_on_one_rank_does_not_hide_those_behind_it(tmp_path):
    path = tmp_path / "own_test.py"
    path.write_text(textwrap.dedent(OWN))
    outcome_of = running.outcomes_on_ranks(str(path), functools.partial(prepare, "data parallel"))
    kinds = {name: outcome.partition(":")[0] for name, outcome in outcome_of.items()}
    assert kinds == {
        "test_before": "passed",
        "test_on_rank_1": "failed",
        "test_refused": "refused",
        "test_alone": "failed",
        "test_after": "passed",
    }
    assert "not on this rank" in outcome_of["test_on_rank_1"]
