"""The edge of a layer: rules for outputs are kept, partial sums are reduced once."""

import logging
from collections import Counter

import keras
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardcore
from shardcore.domain.errors import LayoutError
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    STRATEGY,
    assert_close,
    assert_fails_everywhere,
    distribute,
    only_dtensor,
    placements,
)

X = np.random.default_rng(0).normal(size=(8, 6, 8)).astype("float32")


BOOKKEEPING = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Counts the collectives that tensors take part in, by kind."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor first, then what it does with local tensors
        if operator.namespace == "_c10d_functional" and operator._opname not in BOOKKEEPING:
            self.counts[operator._opname] += 1
        return operator(*args, **(kwargs or {}))


class Probe(keras.layers.Layer):
    """Notes the layout of its input."""

    seen = ""

    def call(self, x):
        if x.device.type != "meta":
            self.seen = placements(x)
        return x


def probed(rules, mesh=(2, 2)):
    """Two dense layers, and what a probe after each of them saw; with the result."""
    if mesh:
        distribute(
            mesh, {"first/kernel": (None, "model"), "second/kernel": ("model", None), **rules}
        )
    keras.utils.set_random_seed(1)
    x = keras.Input((6, 8))
    probes = Probe(), Probe()
    h = probes[0](keras.layers.Dense(8, name="first")(x))
    model = keras.Model(x, probes[1](keras.layers.Dense(8, name="second")(h)))
    model.compile("sgd", "mse", jit_compile=False)
    model.train_on_batch(X, X)
    values = {"predictions": model.predict_on_batch(X)}
    return values | {v.path: v.numpy() for v in model.variables}, [probe.seen for probe in probes]


@pytest.mark.parametrize(
    ("rules", "seen"),
    [
        ({}, ["S(0) S(2)", "S(0) R"]),  # the second layer's sums over "model" are done
        ({"first/output": ("data", None, None)}, ["S(0) R", "S(0) R"]),
        ({"second/output": ("data", "model", None)}, ["S(0) S(2)", "S(0) S(1)"]),
        ({"(first|second)/output": (None, None, None)}, ["R R", "R R"]),
        ({"first/output": (None, "data", "model")}, ["S(1) S(2)", "S(1) R"]),
    ],
    ids=["none", "gathered", "sequence", "replicated", "moved"],
)
def test_the_next_layer_gets_the_layout_that_the_rule_says(rules, seen):
    ((reference, _),) = run_ranks(lambda rank: probed(rules, mesh=None), 1)
    results = run_ranks(lambda rank: probed(rules), 4)
    assert_close([values for values, _ in results], reference)
    if STRATEGY == "dtensor":  # else kernels are gathered, and the model axis shards no work
        assert [found for _, found in results] == [seen] * 4


def test_a_rule_of_another_number_of_dims_is_named_with_the_layer():
    assert_fails_everywhere(
        lambda rank: probed({"first/output": ("data", None)}, (2, 1)), 2, error=LayoutError,
        match=r"first/output.*shape \(8, 6, 8\).*\('data', None\)",
    )  # fmt: skip


def decoder_block(rank, mesh):
    """The collectives of one training step, by kind, on a Megatron decoder block."""
    columns, rows = (None, "model", None), ("model", None, None)
    distribute(
        mesh,
        {
            "attention/(query|key|value)/kernel": columns,
            "attention/(query|key|value)/bias": ("model", None),
            "attention/attention_output/kernel": rows,
            "first/kernel": (None, "model"),
            "first/bias": ("model",),
            "second/kernel": ("model", None),
        },
    )
    keras.utils.set_random_seed(1)
    x = keras.Input((6, 8))
    h = keras.layers.LayerNormalization(name="norm")(x)
    h = x + keras.layers.MultiHeadAttention(4, 2, name="attention")(h, h, use_causal_mask=True)
    f = keras.layers.Dense(16, activation="gelu", name="first")(h)
    model = keras.Model(x, h + keras.layers.Dense(8, name="second")(f))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.train_on_batch(X, X)
    with Collectives() as seen:
        model.train_on_batch(X, X)
    return dict(seen.counts)


@only_dtensor
@pytest.mark.parametrize(
    ("mesh", "reductions"),
    [
        # Attention and feed-forward each end in a sum over "model" forward, and begin with one
        # backward, for the gradient of their input.
        ((1, 2), 4),
        # The gradients of all variables, which fit in one bucket, and the loss.
        ((2, 1), 2),
        ((2, 2), 6),
    ],
)
def test_a_megatron_block_sends_what_theory_says(mesh, reductions):
    results = run_ranks(decoder_block, mesh[0] * mesh[1], mesh)
    assert results == [{"all_reduce": reductions}] * len(results)


def test_rules_and_variables_without_a_partner_are_warned_of_once():
    def program(rank):
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("shardcore.rules").addHandler(handler)
        distribute((1, 2), {"hidden/kernel": (None, "model"), "hiden/bias": ("model",)})
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(4, name="hidden")(x))
        model.compile("sgd", "mse")
        before = list(messages)
        for _ in range(2):
            model.train_on_batch(np.ones((2, 4)), np.ones((2, 4)))
        return before, messages, shardcore.rules_report(model)

    for before, messages, report in run_ranks(
        program, 2
    ):  # whether a rank prints is another matter
        assert before == []
        unused, unmatched = messages
        assert "rule 'hiden/bias' matches no variable" in unused
        assert "'hidden/bias'" in unused  # the hint
        assert "1 of 2 variables of model 'functional' match no rule" in unmatched
        assert "are replicated: hidden/bias" in unmatched
        assert report.matched == {"hidden/kernel": "hidden/kernel"}
        assert report.unused_rules == ("hiden/bias",)
        assert report.unmatched_paths == ("hidden/bias",)


def test_every_output_of_a_layer_is_at_its_edge():
    class Two(keras.layers.Layer):
        def call(self, x):
            return {"sum": x.sum(0), "pair": (x, x * 2)}

    def program(rank):
        distribute((2, 2), {})
        outputs = Two()(shardcore.ensure_dtensor_input(torch.as_tensor(X)))
        return keras.tree.map_structure(placements, outputs)

    # Of a sum over rows each rank gets a part, as of rows.
    expected = {"sum": "S(0) R", "pair": ("S(0) R", "S(0) R")}
    assert run_ranks(program, 4) == [expected] * 4
