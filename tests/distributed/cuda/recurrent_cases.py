"""Calls of cuDNN's recurrent layers, and their results on one device."""

from itertools import compress

import attrs
import numpy as np
import torch

from tests import cuda_recurrent
from tests.cuda_recurrent import GRU, LSTM

STEPS, SIZE, HIDDEN = 3, 4, 2


@attrs.frozen
class Case:
    mode: int = LSTM
    batch_first: bool = True
    layers: int = 1
    directions: int = 1
    used: tuple[bool, ...] = (True, True, True)  # which results have a gradient


CASES = {
    "lstm": Case(),
    "lstm, steps first": Case(batch_first=False),
    "lstm, output used": Case(used=(True, False, False)),
    "lstm, states used": Case(used=(False, True, True)),
    "lstm, two layers, both directions": Case(layers=2, directions=2),
    "gru": Case(GRU),
    "gru, both directions, steps first": Case(GRU, batch_first=False, directions=2),
}


def arrays(case, batch):
    """Input, states, weights, and scales of the results."""
    rng, gates = np.random.default_rng(0), (4 if case.mode == LSTM else 3) * HIDDEN
    rows = (batch, STEPS) if case.batch_first else (STEPS, batch)
    count, both = case.layers * case.directions, HIDDEN * case.directions
    sizes = [SIZE if at < case.directions else both for at in range(count)]
    states = [(count, batch, HIDDEN)] * (2 if case.mode == LSTM else 1)
    weights = [
        each for size in sizes for each in ((gates, size), (gates, HIDDEN), (gates,), (gates,))
    ]
    shapes = [(*rows, SIZE)], states, weights, [(*rows, both), *states]
    return [
        [torch.as_tensor(rng.normal(size=each).astype("float32")) for each in group]
        for group in shapes
    ]


def on_cpu(case, x, states, weights):
    """torch's own layers on a CPU."""
    run, hidden = (torch._VF.lstm, states) if case.mode == LSTM else (torch._VF.gru, states[0])
    how = True, case.layers, 0.0, True, case.directions == 2, case.batch_first
    return run(x, hidden, weights, *how)


def by_cudnn(case, x, states, weights, **how):
    sizes = case.batch_first, case.directions
    hx, cx = (*states, None)[:2]
    return cuda_recurrent.recur(case.mode, x, hx, cx, weights, *sizes, case.layers, **how)


def results(call, case, x, states, weights, scales):
    """The results, and the gradients of input, states and weights, by name."""
    trained = [each.requires_grad_() for each in (*x, *states, *weights)]
    found = call(case, *x, states, weights)
    used, scales = ([*compress(each, case.used)] for each in (found, scales))
    gradients = torch.autograd.grad(used, trained, scales)
    named = {"result": found, "x": gradients[:1], "state": gradients[1 : 1 + len(states)]}
    named["weight"] = gradients[1 + len(states) :]
    return {f"{name} {at}": each for name, group in named.items() for at, each in enumerate(group)}
