"""DTensor plans an operator for a new shape of batch by estimates, not by searches."""

import keras
import numpy as np
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close, distribute

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("float32")
RULES = {
    ".*/(query|key|value)/kernel": (None, "model", None),
    ".*/attention_output/kernel": ("model", None, None),
}


def test_attention_with_dropout_is_planned_without_a_search_for_every_way():
    """Its heads are sharded, and einsum reshapes them: torch searches a path for the placements."""

    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        searches = []
        search = DTensorRedistributePlanner.find_min_cost_path

        def count(planner, *states):
            searches.append(states)
            return search(planner, *states)

        DTensorRedistributePlanner.find_min_cost_path = count
        keras.utils.set_random_seed(1)
        x = keras.Input((6, 8))
        attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)
        model = keras.Model(x, attention(x, x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses = [model.train_on_batch(X, X), model.train_on_batch(X[:2], X[:2])]
        return {"losses": losses, "weights": model.get_weights()[0]}, len(searches)

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 2, (1, 2), timeout=120)
    assert_close([values for values, _ in results], reference)
    # torch searches once for each way of running each operator, for each shape of batch.
    for _, searches in results:
        assert searches < 20
