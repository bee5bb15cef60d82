"""The warning of an operator that runs on whole operands."""

import keras
import numpy as np
import torch

from shardcore.adapters import fallback
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute


class Counting(keras.layers.Layer):
    def call(self, x):
        return torch.histc(x.reshape(-1).float(), bins=4, min=0, max=4)


def test_it_names_operator_layer_and_cost():
    def program(rank):
        distribute((2, 1))
        warnings = []
        fallback.logger.warning = lambda message, *values: warnings.append(message % values)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Counting(name="counting")])
        counts = model.predict_on_batch(np.array([[0, 1, 1], [3, 3, 3]], "int32"))
        return counts.tolist(), warnings

    for counts, warnings in run_ranks(program, 2):
        assert counts == [1, 2, 0, 3]
        (warning,) = warnings
        assert warning.startswith("Operator aten.histc.default in layer 'sequential/counting' ")
        assert "(6,) as [S(0), R]" in warning
        assert "(24 bytes)" in warning
