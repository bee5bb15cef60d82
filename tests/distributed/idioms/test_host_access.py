"""Arrays, texts, numbers and memory of sharded tensors: the full tensor, or our error."""

import copy

import numpy as np
import pytest
import torch
from torch.utils.dlpack import to_dlpack  # before it is replaced

from shardcore.domain.errors import ShardedTensorError
from shardcore.testing import run_ranks
from tests.distributed.idioms.running import LAYOUTS, A, B, make, run_idioms
from tests.distributed.programs import distribute


def to_numpy(make):
    return torch.tensor(np.from_dlpack(make(A))), torch.tensor(np.asarray(make(A)))


def to_torch(make):
    x = make(A)
    by_capsules = [torch.from_dlpack(each(x)) for each in (to_dlpack, torch.utils.dlpack.to_dlpack)]
    return *by_capsules, torch.from_dlpack(x) * 1, torch.asarray(x) * 1, torch.as_tensor(x) * 1


def by_functions(make):
    x, y = make(A), make(A)
    x.apply_(lambda number: number + 1)
    y.map_(make(B), lambda one, other: one - other)
    return x * 1, y * 1


def as_texts(make):
    x = make(A).sum()
    return f"{x:.4f}", f"{x}", f"{make(A).mean():8.2e}", f"{make(A).requires_grad}"


def as_numbers(make):
    total = make(A).sum()
    places = make(np.array([1, 2]))
    return float(total), int(total), complex(total), bool(total), range(5)[places[1]]


def in_lists(make):
    total, rows = make(A).sum(), make(np.array([3, 4]))
    return (
        torch.tensor([total, total]),
        torch.as_tensor([total, 1.0]),
        make(A).new_tensor([total, total]) * 1,
        torch.tensor([rows[0], rows[1]]),
        torch.tensor([total > 0, total < 0]),
    )


def compared(make):
    x = make(A)
    return (
        torch.equal(x, make(A)),
        torch.equal(x, make(B)),
        x.equal(torch.tensor(A)),
        torch.equal(torch.tensor(A), x),
        torch.equal(x, x[0]),
    )


def copied(make):
    return copy.deepcopy(make(A)) * 1, copy.copy(make(A)) * 1


IDIOMS = [to_numpy, to_torch, by_functions, as_texts, as_numbers, in_lists, compared, copied]


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_they_are_those_of_one_device(strategy):
    run_idioms(IDIOMS, strategy)


NEED_MEMORY = ("data_ptr", "share_memory_", "storage", "untyped_storage")


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_memory_is_refused_with_a_remedy(strategy):
    def program(rank):
        distribute((1, 2), strategy=strategy)
        for layout in LAYOUTS:
            x = make(A, layout)
            for name in NEED_MEMORY:
                with pytest.raises(ShardedTensorError, match=rf"{name}\(\).*full_tensor.*to_local"):
                    getattr(x, name)()
        module = torch.nn.Linear(6, 4)
        module.weight = torch.nn.Parameter(make(A, "last"))
        with pytest.raises(ShardedTensorError, match="share_memory_"):
            module.share_memory()
        # Torch's own code gets what it asks for: an LSTM of cuDNN compares addresses of weights.
        recurrent = torch.nn.LSTM(6, 4)
        recurrent.weight_ih_l0 = torch.nn.Parameter(make(np.tile(A, (4, 1)), "last"))
        recurrent.flatten_parameters()
        assert torch.is_tensor(recurrent(torch.tensor(A))[0])

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_the_text_of_a_part_of_a_sum_says_so(strategy):
    """One rank may print it, as a debugger does: it shows the local shard, without a collective."""

    def program(rank):
        distribute((1, 2), strategy=strategy)
        x = make(A, "last")
        loss = (torch.nn.Parameter(x) * 2).sum()
        if rank == 0:
            for text in (str(loss), repr([loss]), repr(make(A, "pending"))):
                assert "one of the parts of its value on all ranks: full_tensor()" in text
            assert "parts of its value" not in repr(x)

    run_ranks(program, 2)
