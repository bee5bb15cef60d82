"""Sparse and nested tensors, and packed sequences, beside sharded ones: one device's numbers."""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.distributed.idioms.running import A, B, run_idioms

BATCH = np.stack([A, B])
KINDS = ("sparse", "sparse_csr", "sparse_csc", "sparse_bsr")


def _sparse(kind):
    blocks = ((2, 2),) if kind == "sparse_bsr" else ()
    return getattr(torch.tensor(A).relu(), f"to_{kind}")(*blocks)


def products(make):
    return [_sparse(kind) @ make(B.T.copy()) for kind in KINDS]


def gradients(make):
    found = []
    for kind in KINDS[:2]:
        weight = torch.nn.Parameter(make(B.T.copy()))
        torch.sparse.mm(_sparse(kind), weight).pow(2).sum().backward()
        found.append(weight.grad)
    return found


def made_of_dense(make):
    return [make(A).to_sparse(), make(A).to_sparse_csr(), make(A).to_sparse_bsr((2, 2))]


def added(make):
    x = make(B)
    x.add_(_sparse("sparse"))
    return make(B) + _sparse("sparse"), x


def rows_of_an_embedding(make):
    table = torch.nn.Parameter(make(A))
    torch.nn.functional.embedding(torch.tensor([0, 2, 0]), table, sparse=True).sum().backward()
    return table.grad


def nested(make):
    rows = torch.nested.as_nested_tensor([make(A), make(A[:2])])
    return torch.nested.to_padded_tensor(rows, 0.0) * 1


def transformer_with_padding(make):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    encoder.layers[0].linear1.weight = torch.nn.Parameter(make(np.tile(A, (2, 1))))
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        return encoder(make(BATCH), src_key_padding_mask=padding)


def packed(make):
    torch.manual_seed(0)
    found = []
    for kind, lengths in ((torch.nn.GRU, [4, 2]), (torch.nn.LSTM, [2, 4])):
        recurrent = kind(6, 3, batch_first=True, bidirectional=True)
        x = make(BATCH).requires_grad_()
        rows = pack_padded_sequence(
            x, torch.tensor(lengths), batch_first=True, enforce_sorted=False
        )
        output, state = recurrent(rows)
        output, sizes = pad_packed_sequence(output, batch_first=True)
        output.pow(2).sum().backward()
        found += [output, state, sizes, x.grad, recurrent.weight_ih_l0.grad]
    return found


def cut_at_places(make):
    places = make(np.array([1, 3]))
    return (
        torch.tensor_split(torch.tensor(A), places),
        torch.tensor_split(make(A), torch.tensor([1, 3])),
        torch.tensor_split(make(A), torch.tensor(3), dim=1),
        pad_sequence([make(A), make(A[:2])], batch_first=True),
    )


IDIOMS = [
    *(products, gradients, made_of_dense, added, rows_of_an_embedding, nested),
    *(transformer_with_padding, packed, cut_at_places),
]


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_they_give_the_numbers_of_one_device(strategy):
    run_idioms(IDIOMS, strategy)
