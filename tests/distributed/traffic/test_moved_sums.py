"""The states of metrics: pending in a step, right for each reader, full tensors after it."""

import keras
import numpy as np
import pytest
from keras import ops

from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import mlp
from tests.distributed.programs import STRATEGY
from tests.distributed.traffic.moved import DATA, assert_same, compiled, distribute, numbers

METRICS = ["mae", "cosine_similarity"]


class Reading(keras.Model):
    """Reads the states of its metrics in the middle of a step, and writes one."""

    def train_step(self, data):
        x, y, *_ = data
        self._loss_tracker.update_state(ops.mean(ops.square(ops.subtract(self(x), y)), axis=-1))
        self.seen.append(float(self._loss_tracker.result()))
        self._loss_tracker.total.assign(self._loss_tracker.total * 2)
        self._loss_tracker.update_state(ops.sum(y, axis=-1))
        return {"loss": self._loss_tracker.result(), "total": self._loss_tracker.total.value}


def reading():
    model = compiled(mlp)
    own = Reading(model.inputs[0], model.outputs[0])
    own.seen = []
    own.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return own


def programs(rank, strategy=None):
    if strategy:
        distribute(mlp, (2, 1), strategy=strategy)
    x, y = DATA[mlp]
    model = compiled(mlp, metrics=[*METRICS, keras.metrics.AUC(num_thresholds=5)])
    found = {}
    history = model.fit(x, np.abs(y) > 1, epochs=2, batch_size=4, verbose=0, shuffle=False)
    for name, values in history.history.items():
        found[f"fit {name}"] = np.array(values)
    logs = model.evaluate(x, np.abs(y) > 1, batch_size=5, verbose=0, return_dict=True)
    found |= {f"evaluate {name}": np.array(value) for name, value in logs.items()}
    own = reading()
    for _ in range(2):
        logs = own.train_on_batch(x, y, return_dict=True)
        found |= {f"own {name}": np.array(value) for name, value in logs.items()}
    found["seen"] = np.array(own.seen)
    return found | {f"state {v.path}": v.numpy() for v in own.metrics_variables}


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_metrics_are_those_of_one_device(strategy):
    (expected,) = run_ranks(programs, 1)
    for found in run_ranks(programs, 2, strategy, timeout=60):
        assert_same(found, expected, strategy)


def counted(rank, strategy):
    distribute(mlp, (2, 1), strategy=strategy)
    model = compiled(mlp, metrics=METRICS, jit_compile=False)
    x, y = DATA[mlp]
    model.test_on_batch(x, y)
    with count_collectives() as traffic:
        model.test_on_batch(x, y)
    states = [v._value for m in model.metrics for v in m.variables]
    pending = [str(p) for each in states for p in each.placements if "P" in str(p)]
    return dict(traffic.calls), dict(traffic.operand_bytes), pending


def test_a_step_of_evaluation_reduces_once_and_leaves_nothing_pending():
    for found in run_ranks(counted, 2, STRATEGY):
        assert found == ({"all_reduce": 1}, {"all_reduce": 4 * 3}, [])


def classified(rank, mesh=None):
    """A loss that is pending over both axes, and an accuracy that is so over one."""
    if mesh:
        distribute(classes, mesh, {"logits/kernel": (None, "model"), "logits/bias": ("model",)})
    model = compiled(classes, classes=True, metrics=["accuracy"], jit_compile=False)
    kernel = np.eye(16, 10) + np.random.default_rng(0).normal(size=(16, 10))
    model.set_weights([kernel, np.zeros(10)])  # some classes are right, on any device
    x = DATA[mlp][0]
    y = np.argsort(x[:, :10], axis=1)[:, -1] % 10
    model.test_on_batch(x, y)
    with count_collectives() as traffic:
        logs = model.test_on_batch(x, y, return_dict=True)
    return {name: np.array(value) for name, value in logs.items()}, dict(traffic.calls)


def classes():
    x = keras.Input((16,))
    return keras.Model(x, keras.layers.Dense(10, name="logits")(x))


def test_sums_over_different_axes_are_reduced_together():
    ((expected, _),) = run_ranks(classified, 1)
    assert 0 < expected["accuracy"] < 1
    for found, calls in run_ranks(classified, 4, (2, 2)):
        assert_same(found, expected, "on both axes")
        # the largest and the powers of the loss, the largest of the accuracy; both sums, by axis
        assert calls == {"all_reduce": 3 + 2}


def after_a_failure(rank):
    distribute(mlp, (2, 1))
    model = compiled(mlp, metrics=METRICS, jit_compile=False)
    x, y = DATA[mlp]
    model.test_on_batch(x, y)
    model.reset_metrics()  # Keras 3.13 and 3.14 do not before a step
    stored = [each._value for each in model.metrics_variables]
    original = type(model).compute_metrics

    def fail(*_args, **_named):
        raise RuntimeError("half way")

    type(model).compute_metrics = fail  # the sum of the losses waits by then
    try:
        with pytest.raises(RuntimeError, match="half way"):
            model.test_on_batch(x, y)
    finally:
        type(model).compute_metrics = original
    assert all(v._value is s for v, s in zip(model.metrics_variables, stored, strict=True))
    state = {v.path: v.numpy() for v in model.metrics_variables}
    model.reset_metrics()
    return state, numbers(model, model.test_on_batch(x, y, return_dict=True))


def test_a_step_that_failed_leaves_no_sums_behind():
    def undisturbed(rank):
        model = compiled(mlp, metrics=METRICS)
        return numbers(model, model.test_on_batch(*DATA[mlp], return_dict=True))

    (expected,) = run_ranks(undisturbed, 1)
    for state, found in run_ranks(after_a_failure, 2):
        assert np.isnan(state["loss/total"])  # the loss of the batch is lost, and its count is not
        assert_same(found, expected, "after a failure")
