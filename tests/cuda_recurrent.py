"""The recurrent layers that torch has by cuDNN only, as plain formulas, on a CPU.

They check what the ones of cuDNN check, and that each call of a gradient gets what its own forward
call kept, which it then overwrites, as cuDNN does.
"""

from functools import partial
from typing import Any

import torch

from tests import cuda_operators

aten = torch.ops.aten
# cuDNN's numbers, and the gates of each.
LSTM, GRU = 2, 3
_GATES = {LSTM: 4, GRU: 3}


def recur(
    mode, x, hx, cx, weights, batch_first=True, directions=1, layers=1, buffer=None, dropout=0.0,
    batch_sizes=(), dropout_state=None,
):  # fmt: skip
    """The output and the last states, as `torch.lstm` and `torch.gru` call it on CUDA."""
    how = hx.shape[2], 0, layers, batch_first, dropout, True, directions == 2
    operands = x, weights, len(weights) // len(hx), buffer, hx, cx
    found = aten._cudnn_rnn.default(*operands, mode, *how, batch_sizes, dropout_state)
    return found[: 2 if cx is None else 3]


def _gates(mode, x, h, c, weights):
    """The next states of one step, and what its gradient needs."""
    of_x, of_h = (v @ w.T + b for v, w, b in zip((x, h), weights[:2], weights[2:], strict=True))
    if mode == LSTM:
        inner, forget, new, outer = (of_x + of_h).chunk(4, 1)
        inner, forget, outer = inner.sigmoid(), forget.sigmoid(), outer.sigmoid()
        new = new.tanh()
        cell = forget * c + inner * new
        return outer * cell.tanh(), cell, (inner, forget, new, outer)
    (r, z, n), (r_h, z_h, n_h) = of_x.chunk(3, 1), of_h.chunk(3, 1)
    reset, update = (r + r_h).sigmoid(), (z + z_h).sigmoid()
    new = (n + reset * n_h).tanh()
    return (1 - update) * new + update * h, None, (reset, update, new, n_h)


def _of_gates(mode, d_h, d_c, h, c, cell, gates):
    """The gradients of the two products of one step, and of the states before it."""
    if mode == LSTM:
        inner, forget, new, outer = gates
        d_cell = d_c + d_h * outer * (1 - cell.tanh() ** 2)
        found = (
            d_cell * new * inner * (1 - inner),
            d_cell * c * forget * (1 - forget),
            d_cell * inner * (1 - new**2),
            d_h * cell.tanh() * outer * (1 - outer),
        )
        both = torch.cat(found, 1)
        return both, both, torch.zeros_like(h), d_cell * forget
    reset, update, new, n_h = gates
    d_new = d_h * (1 - update) * (1 - new**2)
    d_update = d_h * (h - new) * update * (1 - update)
    d_reset = d_new * n_h * reset * (1 - reset)
    of_x = torch.cat((d_reset, d_update, d_new), 1)
    return of_x, torch.cat((d_reset, d_update, d_new * reset), 1), d_h * update, None


def _run(x, weights, hx, cx, mode, directions):
    """The output (steps, batch, size), the last states, and per layer and direction its steps."""
    last_h, last_c, kept = [], [], []
    for at in range(0, len(hx), directions):
        outputs = []
        for way in range(directions):
            h, c, found, steps = hx[at + way], None if cx is None else cx[at + way], [], []
            for step in x if way == 0 else x.flip(0):
                after, cell, gates = _gates(mode, step, h, c, weights[at + way])
                steps.append((step, h, c, cell, gates))
                h, c = after, cell
                found.append(h)
            outputs.append(torch.stack(found if way == 0 else found[::-1]))
            last_h.append(h)
            last_c.append(c)
            kept.append(steps)
        x = torch.cat(outputs, 2)
    return x, torch.stack(last_h), None if cx is None else torch.stack(last_c), kept


def _as_bytes(kept) -> torch.Tensor:
    """The values of all gates, as that which cuDNN keeps."""
    gates = [gate for steps in kept for *_, found in steps for gate in found]
    return torch.cat([each.reshape(-1) for each in gates]).view(torch.uint8).clone()


def _packed(weights) -> torch.Tensor:
    return torch.cat([each.view(-1) for each in weights])


def _checked(x, weights, stride, hx, cx, mode, hidden, layers, batch_first, bidirectional):
    """The input (steps, batch, size), the weights per layer and direction, and the directions."""
    x, directions = x.transpose(0, 1) if batch_first else x, 2 if bidirectional else 1
    assert x.dim() == 3
    assert 0 not in x.shape
    assert (cx is None) == (mode != LSTM), "rnn: illegal defined cx for non-LSTM RNN"
    for each in (hx,) if cx is None else (hx, cx):
        assert each.shape == (layers * directions, x.shape[1], hidden), "Expected hidden size"
        assert each.is_contiguous(), "rnn: hx is not contiguous"
    assert stride == 4
    groups = [weights[at : at + stride] for at in range(0, len(weights), stride)]
    assert len(groups) == layers * directions
    for number, (of_x, of_h, *biases) in enumerate(groups):
        rows, first = _GATES[mode] * hidden, number < directions
        assert of_x.shape == (rows, x.shape[2] if first else hidden * directions)
        assert of_h.shape == (rows, hidden)
        assert [each.shape for each in biases] == [(rows,)] * 2
    return x, groups, directions


def _forward(
    x, weight, stride, weight_buf, hx, cx, mode, hidden, proj, layers, batch_first, dropout, train,
    bidirectional, batch_sizes, dropout_state,
):  # fmt: skip
    sizes = stride, hx, cx, mode, hidden, layers, batch_first, bidirectional
    x, groups, directions = _checked(x, weight, *sizes)
    packed = _packed(weight)
    if weight_buf is not None:
        assert torch.equal(weight_buf, packed)
        packed = weight_buf
    output, hy, cy, kept = _run(x, groups, hx, cx, mode, directions)
    reserve = _as_bytes(kept) if train else x.new_empty(0, dtype=torch.uint8)
    output = output.transpose(0, 1) if batch_first else output
    return output, hy, x.new_empty(0) if cy is None else cy, reserve, packed


def _backward(
    x, weight, stride, weight_buf, hx, cx, output, grad_output, grad_hy, grad_cy, mode, hidden,
    proj, layers, batch_first, dropout, train, bidirectional, batch_sizes, dropout_state, reserve,
    output_mask,
):  # fmt: skip
    assert train, "cudnn RNN backward can only be called in training mode"
    sizes = stride, hx, cx, mode, hidden, layers, batch_first, bidirectional
    x, groups, directions = _checked(x, weight, *sizes)
    assert torch.equal(weight_buf, _packed(weight))
    again, _, _, kept = _run(x, groups, hx, cx, mode, directions)
    assert torch.equal(reserve, _as_bytes(kept)), "it was kept by another call"
    assert torch.equal(again.transpose(0, 1) if batch_first else again, output)
    d_y = torch.zeros_like(output) if grad_output is None else grad_output
    d_y = d_y.transpose(0, 1) if batch_first else d_y
    assert d_y.shape == again.shape
    d_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
    d_cy = torch.zeros_like(hx) if grad_cy is None else grad_cy
    assert d_hy.shape == d_cy.shape == hx.shape
    of_weights: list[Any] = [None] * len(weight)
    d_hx, d_cx = torch.zeros_like(hx), torch.zeros_like(hx)
    for at in range((layers - 1) * directions, -1, -directions):
        d_x: Any = 0
        for way, d_out in enumerate(d_y.chunk(directions, 2)):
            place, d_steps = at + way, []
            w_x, w_h, *_ = groups[place]
            d_h, d_c = d_hy[place], d_cy[place]
            sums = [torch.zeros_like(each) for each in groups[place]]
            last_first = d_out.flip(0) if way == 0 else d_out
            for step, d in zip(reversed(kept[place]), last_first, strict=True):
                value, h, c, cell, gates = step
                of_x, of_h, d_h, d_c = _of_gates(mode, d_h + d, d_c, h, c, cell, gates)
                d_h = d_h + of_h @ w_h
                d_steps.append(of_x @ w_x)
                parts = (of_x.T @ value, of_h.T @ h, of_x.sum(0), of_h.sum(0))
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
            d_hx[place], d_cx[place] = d_h, 0 if d_c is None else d_c
            of_weights[place * stride : (place + 1) * stride] = sums
            d_x = d_x + torch.stack(d_steps[::-1] if way == 0 else d_steps)
        d_y = d_x
    reserve.zero_()
    d_y = d_y.transpose(0, 1) if batch_first else d_y
    found = of_weights if output_mask[3] else []
    return d_y.clone(), d_hx, None if cx is None else d_cx, found


_FUNCTIONS: dict[str, Any] = {"_cudnn_rnn": _forward, "_cudnn_rnn_backward": _backward}
# A context in which the CPU has them; gives the calls: the operator, the shape of the input.
on_cpu = partial(cuda_operators.on_cpu, _FUNCTIONS, {})
