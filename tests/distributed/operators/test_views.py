"""Views of a sharded dim are copies below, and views above: whoever is written, all have it."""

import keras
import numpy as np
import torch

import shardcore
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    as_arrays,
    assert_close,
    assert_fails_everywhere,
    distribute,
)

VALUES = np.arange(24, dtype="float32").reshape(4, 6)


def views_of(x):
    rows = x.unbind(0)
    half, last = x.split(2)
    return {
        "row": x[0],
        "rows": x[0:3],
        "column": x[:, 1],
        "element": x[0, 1],
        "row of rows": x[0:3][0],
        "block of a row": x[0].view(2, 3)[1],
        "unbound": rows[0],
        "half": half,
        "last": last,
        "transposed": x.T[1],
    }


def write_a_row(x, views):
    views["row"].add_(100)


def write_an_element(x, views):
    views["element"].fill_(-1)


def write_an_item(x, views):
    x[1, 1:4] = torch.tensor([7.0, 8.0, 9.0])


def write_the_base(x, views):
    x.mul_(2)


def write_where_dtensor_is_wrong(x, views):
    x.index_add_(0, torch.tensor([0, 0]), torch.ones(2, 6))


def write_a_list(x, views):
    torch._foreach_add_([x], 5.0)


def write_a_list_of_views(x, views):
    torch._foreach_add_([views["row"], x, views["column"]], [1.0, 2.0, 3.0])


def write_random_values(x, views):
    torch.manual_seed(1)
    views["row"].uniform_()
    x.T[2].normal_()
    x[3:].random_(0, 9)


def write_while_inferring(x, views):
    with torch.inference_mode():
        inferred = x * 2
        row = inferred[1]
        inferred[0] = 7.0
        inferred[1:3][0] -= 5
        row.view(2, 3)[1].mul_(2)
    x.copy_(inferred + row)


def write_out(x, views):
    torch.add(x, 1.0, out=x)


def write_out_into_a_row(x, views):
    torch.add(x[0], 1.0, out=x[0])


def write_after_an_untracked_write(x, views):
    part = x.to_local() if isinstance(x, ShardedTensor) else x
    part.mul_(2)
    views["row"].add_(1)


def write_twice(x, views):
    views["column"].sub_(3)
    views["half"].mul_(10)


WRITES = [
    write_a_row,
    write_an_element,
    write_an_item,
    write_the_base,
    write_where_dtensor_is_wrong,
    write_a_list,
    write_a_list_of_views,
    write_random_values,
    write_while_inferring,
    write_out,
    write_out_into_a_row,
    write_after_an_untracked_write,
    write_twice,
]
SPECS = [("data", None), ("data", "model")]


def all_writes(rank, specs):
    values = {}
    if specs:
        distribute((2, 2))
    for spec in specs or SPECS:
        for write in WRITES:
            x = torch.tensor(VALUES)
            if specs:
                x = shardcore.distribute_tensor(x, spec)
            views = views_of(x)
            write(x, views)
            values |= {f"{spec} {write.__name__} {name}": each for name, each in views.items()}
            values[f"{spec} {write.__name__} base"] = x
    return as_arrays(values)


def test_a_write_reaches_the_base_and_every_view():
    (reference,) = run_ranks(all_writes, 1, None)
    assert_close(run_ranks(all_writes, 4, SPECS), reference)


def test_a_shape_that_does_not_fit_raises_the_error_of_one_device():
    """The operator is not tried on full operands, which would communicate."""

    def program(rank):
        distribute((2, 1))
        x = shardcore.distribute_tensor(torch.tensor(VALUES), ("data", None))
        x.add_(torch.ones(5))

    assert_fails_everywhere(program, 2, error=RuntimeError, match="must match the size")


def test_views_of_a_variable_follow_assign_and_the_optimizer():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, {".*/kernel": ("model", None)})
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        kernel = model.layers[0].kernel
        row = kernel.value.detach()[3]
        values = {}
        model.train_on_batch(VALUES[:, :4], VALUES[:, :3])
        values["trained"] = row.clone()
        kernel.assign(VALUES[:, :3])
        values["assigned"] = row.clone()
        return as_arrays(values)

    (reference,) = run_ranks(program, 1, None)
    assert_close(run_ranks(program, 2, (1, 2)), reference)
