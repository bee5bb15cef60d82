"""The operators of a step, with operations and bytes as counted by hand."""

import pytest
import torch

from shardcore.adapters.cost.step_events import StepEvents
from shardcore.domain.layouts.mesh import Mesh

MESH = Mesh((2,), ("data",))


def seen(run, *shapes):
    """Returns operations and bytes by operator."""
    trace = StepEvents()
    with trace.without_values():
        operands = [torch.empty(shape, requires_grad=True) for shape in shapes]
        with trace.tracing():
            run(*operands)
    work = [each.work for each in trace.events(MESH, {}).operators]
    return {each.operator: (each.times, each.flops, each.bytes) for each in work}


def test_a_product_is_counted_forward_and_backward():
    def run(x, w):
        (x @ w).backward(torch.empty(4, 6))

    # Each of the three products reads two of these matrices, and writes the third.
    found = seen(run, (4, 8), (8, 6))
    assert found["aten.mm.default"] == (3, 2 * 4 * 8 * 6, 4 * (32 + 48 + 24))


def test_results_and_written_operands_count_views_and_questions_do_not():
    def run(x, y):
        with torch.no_grad():
            x.view(2, 8).t()
            x.expand(16).device  # noqa: B018 - a question
            x.add_(y)
            torch.add(x, 1)

    found = seen(run, (16,), (16,))
    assert found == {
        "aten.add_.Tensor": (1, 0, 64 + 64 + 64),  # reads both, writes one
        "aten.add.Tensor": (1, 0, 64 + 64),
    }


def test_attention_on_a_cpu_is_counted_as_on_cuda():
    attend = torch.nn.functional.scaled_dot_product_attention
    found = seen(lambda q: attend(q, q, q).sum().backward(), (1, 2, 8, 4))
    flops = {name: flops for name, (_, flops, _) in found.items() if "attention" in name}
    assert sorted(flops.values()) == [2 * 2 * 2 * 8 * 8 * 4, 5 * 2 * 2 * 8 * 8 * 4]


@pytest.mark.parametrize("fused", [True, False])
def test_the_update_of_an_optimizer_allocates_no_values(fused):
    """2 TB of weights: an update that allocated them would fail."""
    trace = StepEvents()
    with trace.without_values():
        weight = torch.empty(1 << 39, requires_grad=True)
        weight.grad = torch.empty(1 << 39)
        optimizer = torch.optim.Adam([weight], fused=fused)
        with trace.tracing(), trace.updating():
            optimizer.step()
    work = [each.work for each in trace.events(MESH, {}).operators]
    assert all(each.updates for each in work)
    assert sum(each.times * each.bytes for each in work) >= 7 * 4 * (1 << 39)
