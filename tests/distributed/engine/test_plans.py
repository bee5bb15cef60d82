"""The plan of an operator is made once, and looked up by everything that it depends on."""

import keras
import numpy as np
import torch

import shardcore
from shardcore.adapters.engine.plan import Plan
from shardcore.testing import run_ranks
from tests.distributed.models import CASES, decoder
from tests.distributed.programs import distribute
from tests.distributed.traffic.moved import compiled


def test_a_third_step_makes_no_plan_even_with_another_learning_rate():
    def program(rank):
        distribute((1, 2), {".*expand/kernel": (None, "model")})
        model = compiled(decoder, classes=True, jit_compile=False)
        counts = []
        for rate in (0.1, 0.1, 0.05, 0.025):
            model.optimizer.learning_rate = rate
            model.train_on_batch(*CASES[decoder])
            counts.append(len(model.trainable_variables[0].value.engine.plans))
        return counts

    for first, *others in run_ranks(program, 2):
        assert first > 50
        assert len(set(others)) == 1


def test_plans_differ_by_shape_layout_dtype_and_number():
    """Shapes, layouts, dtypes, numbers that choose dims, and zero, by which no sum is divided."""
    x = np.arange(24, dtype="float32").reshape(4, 6)

    def results(tensor):
        calls = [
            lambda t: t.sum(0),
            lambda t: t.sum(1),
            lambda t: t.reshape(6, 4),
            lambda t: t.reshape(2, 12),
            lambda t: t.to(torch.float64) * 2,
            lambda t: t.to(torch.int64) * 2.5,
            lambda t: t.to(torch.int64) * 2,
            lambda t: t.to(torch.int64) * True,
            lambda t: t.sum(0) / 2.0,
            lambda t: t.sum(0) / 0.0,
            lambda t: t[1:],
            lambda t: t[2:],
        ]
        return [call(tensor) for call in calls]

    def program(rank, sharded):
        if not sharded:
            return [each.numpy() for each in results(torch.tensor(x))]
        distribute((2, 1))
        keras.utils.set_random_seed(1)
        found = []
        for spec in (("data", None), (None, "data"), ("data", None)):
            tensor = shardcore.distribute_tensor(x, spec)
            found.append([each.full_tensor().numpy() for each in results(tensor)])
        return found

    (expected,) = run_ranks(program, 1, False)
    for found in run_ranks(program, 2, True):
        for of_layout in found:
            for one, other in zip(of_layout, expected, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


def test_a_plan_prints_layouts_and_collectives_as_a_table():
    def program(rank):
        distribute((1, 2))
        x = shardcore.distribute_tensor(np.ones((4, 6), "float32"), (None, "model"))
        kernel = shardcore.distribute_tensor(np.ones((6, 8), "float32"), (None, "model"))
        _ = x @ kernel
        (x.sum(1) + 1).relu()
        return [str(plan) for plan in x.engine.plans.values() if isinstance(plan, Plan)]

    product, total, plus, _ = run_ranks(program, 2)[0]
    assert product.splitlines() == [
        "aten.mm.default: n k, k m -> n m",
        "operand 0  (4, 6)  (None, 'model')  -> (None, None)  all_gather over 'model'",
        "operand 1  (6, 8)  (None, 'model')",
        "result 0           (None, 'model')",
    ]
    assert total.splitlines()[-1] == "result 0           (None,) with sum over 'model'"
    assert plus.splitlines()[1].endswith("-> (None,)  all_reduce over 'model'")
