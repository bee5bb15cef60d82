"""The warning of an operator that runs on full operands."""

import keras
import numpy as np
import torch

from shardcore.adapters.engine import writes
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute


class Counting(keras.layers.Layer):
    def call(self, x):
        return torch.histc(x.reshape(-1).float(), bins=4, min=0, max=4)


def test_it_names_operator_layer_and_cost_where_the_operands_are_not_small():
    def program(rank):
        distribute((2, 1))
        warnings = []
        writes.logger.warning = lambda message, *values: warnings.append(message % values)
        model = keras.Sequential([keras.Input((None,), dtype="int32"), Counting(name="counting")])
        small, large = np.array([[0, 1, 1], [3, 3, 3]], "int32"), np.ones((2, 300), "int32")
        return [model.predict_on_batch(each).tolist() for each in (small, large, large)], warnings

    for counts, warnings in run_ranks(program, 2):
        assert counts == [[1, 2, 0, 3], [0, 600, 0, 0], [0, 600, 0, 0]]
        (warning,) = warnings
        assert warning.startswith("Operator aten.histc.default in layer 'sequential/counting' ")
        assert "(600,) as [S(0), R]" in warning
        assert "(2400 bytes)" in warning
