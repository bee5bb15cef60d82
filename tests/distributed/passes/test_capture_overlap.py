"""A captured step computes while its collectives run, and needs no more memory."""

from collections import Counter
from unittest import mock

import keras
import numpy as np
import pytest

from shardcore.adapters import torch_private
from shardcore.adapters.capture import passes
from shardcore.adapters.capture.analyses import live_bytes
from shardcore.testing import run_ranks
from tests.distributed.models import cnn, mlp
from tests.distributed.traffic.moved import DATA, TOKENS, compiled, distribute, numbers, transformer

STEPS = 4
PRODUCTS = ("mm.default", "bmm.default", "convolution.default", "convolution_backward.default")
MEGATRON = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ("model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*_up/kernel": (None, "model"),
    ".*_up/bias": ("model",),
    ".*_down/kernel": ("model", None),
}


def block():
    return transformer(1)


def odd():
    """A CNN whose kernels one rank pads to gather them, as those of a vocabulary of 50,257."""
    convolutions = [
        keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"odd_{filters}")
        for filters in (5, 7, 9)
    ]
    ends = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(7)]
    return keras.Sequential([keras.Input((6, 6, 3)), *convolutions, *ends])


SETTINGS = {
    odd: {"mesh": (2, 1), "rules": {".*odd_.*/kernel": (None, None, None, "data")}},
    mlp: {"mesh": (2, 1), "policy": "fully_sharded", "small": 0},
    cnn: {"mesh": (2, 1), "policy": "fully_sharded", "small": 0},
    block: {"mesh": (1, 2), "rules": MEGATRON},
}


def trained(build, jit_compile):
    """The numbers of some steps; of a captured one also its trace, as recorded and as it runs."""
    keras.utils.clear_session(free_memory=False)
    traces = []

    def noted(trace, memories, all_reduces, literals, *options, run_passes=passes.run_passes):
        traces.extend([trace, run_passes(trace, None, all_reduces, literals, *options)])
        return run_passes(trace, memories, all_reduces, literals, *options)

    distribute(build, **SETTINGS[build])
    data = (TOKENS, TOKENS) if build is block else DATA.get(build, DATA[cnn])
    with mock.patch.object(passes, "run_passes", noted):
        model = compiled(build, classes=build is block, jit_compile=jit_compile)
        logs = [model.train_on_batch(*data, return_dict=True) for _ in range(STEPS)][-1]
    return numbers(model, logs), traces


def under_way(trace, kind):
    """For each collective of `kind`, how many products are run between its start and its wait."""
    calls = trace.calls
    found = []
    for place, call in enumerate(calls):
        if torch_private.collective_name(call.operator) == kind:
            made = trace.writes_of(call)
            wait = next(
                n
                for n in range(place, len(calls))
                if torch_private.is_wait(calls[n].operator) and trace.reads_of(calls[n]) == made
            )
            names = [each.operator.__name__ for each in calls[place:wait]]
            found.append(sum(name in PRODUCTS for name in names))
    return found


def compared(build):
    """Compares eager with captured steps.

    Returns the peak memory as recorded and as it runs, the number of collectives as recorded, and
    for each as it runs the number of products meanwhile.
    """
    (eager, _), (captured, (before, after)) = (trained(build, jit) for jit in (False, "auto"))
    for name, value in eager.items():
        np.testing.assert_array_equal(captured[name], value, err_msg=name)
    held = [max(live_bytes(trace)) for trace in (before, after)]
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    recorded = Counter(call.collective for call in before.calls)
    return held, recorded, {kind: under_way(after, kind) for kind in kinds}


@pytest.fixture(scope="module")
def steps():
    return run_ranks(lambda rank: {build: compared(build) for build in SETTINGS}, 2, timeout=120)[0]


@pytest.mark.parametrize("build", SETTINGS)
def test_the_peak_memory_is_that_of_the_recorded_step(build, steps):
    (before, after), *_ = steps[build]
    assert after <= 1.01 * before


def test_weights_are_gathered_and_gradients_scattered_while_the_model_computes(steps):
    *_, after = steps[mlp]
    first, *others = after["all_gather"]
    assert first == 0
    # On a CPU one at a time: that of the kernel under the bias before it, and the other way round.
    assert max(others) >= 1
    # Of the last layer the gradient of the bias is there last, of the first nothing comes after.
    assert after["reduce_scatter"] == [4, 3, 2, 1, 1, 1, 1, 0]


def test_padded_weights_are_prefetched_and_gathered_again(steps):
    _, before, after = steps[odd]
    assert (before["all_gather"], len(after["all_gather"])) == (3, 5)  # but the last one
    assert max(after["all_gather"]) >= 1
    assert max(after["reduce_scatter"]) >= 1


def test_kernels_are_gathered_again_for_the_backward_pass_of_a_convolution(steps):
    _, before, after = steps[cnn]
    again = len(after["all_gather"]) - before["all_gather"]
    convolutions, scales = 3, 1
    assert again == convolutions + scales
    assert len(after["all_gather"]) <= 2 * len(after["reduce_scatter"])


def test_sums_of_gradients_are_under_way_while_those_of_kernels_are_computed(steps):
    _, before, after = steps[block]
    assert before["all_reduce"] == 4
    # Backward: beneath each goes the gradient of three kernels, of the layers that come before it.
    assert after["all_reduce"] == [0, 0, 3, 3]
