"""A case of each outcome of policies on families; `make hub PART=policies` tries all."""

import pytest

from tests.hub import policies
from tests.hub.policies import Outcome, compare

# Those of keras-hub, which are not ours.
pytestmark = pytest.mark.filterwarnings("default")


def test_a_family_under_each_kind_of_policy():
    outcomes = compare("Llama", ["fully_sharded", "context_parallel", "expert_parallel"])
    sharded, replicated, refused = outcomes.values()
    assert (sharded.status, replicated.status, refused.status) == ("ok", "ok", "refused")
    assert (sharded.detail, replicated.detail) == ("0.50", "1.00")
    assert sharded.bytes_here * 2 == replicated.bytes_here
    assert "finds no experts in the model" in refused.detail


def test_a_wrong_gradient_and_a_wrong_share_are_outcomes(monkeypatch):
    step = policies._step

    def wrong(family):
        model, values = step(family)
        path = next(v.path for v in model.variables if v.path.endswith("kernel"))
        is_on_ranks = policies.keras.distribution.distribution() is not None
        return model, values | {path: values[path] + 1e-3 * is_on_ranks}

    monkeypatch.setattr(policies, "_step", wrong)
    assert compare("Llama", ["data_parallel"])["data_parallel"].status == "wrong"
    two = [Outcome("ok", "0.50", 8, 8), Outcome("ok", "0.50", 9, 8)]
    assert policies._of_ranks(two).status == "wrong"
    assert policies._of_ranks([two[0], two[0]]) == two[0]
