"""Products of operands with two sharded dims: the numbers of NumPy, and no line is moved.

A product of (rows, heads) is one of a flattened dim, in segments that one axis shards itself.
"""

import keras
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import distribute

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5, 4)).astype("float32")  # 2 rows, or 1, and 3 tokens, or 2, on a rank
KERNELS = {"abc,cd->abd": (4, 600), "abc,cde->abde": (4, 2, 3), "ab c, cd -> ab d": (4, 6)}
KERNELS = {key: RNG.normal(size=shape).astype("float32") for key, shape in KERNELS.items()}


def product(kind, equation, spec):
    """The product; the gradients of both operands; the collectives of the forward pass."""
    x = shardcore.distribute_tensor(torch.as_tensor(X), ("data", "model", None)).requires_grad_()
    kernel = torch.as_tensor(KERNELS[equation])
    kernel = shardcore.distribute_tensor(kernel, spec).requires_grad_()
    with count_collectives() as traffic:
        if kind == "matmul":
            found = keras.ops.matmul(x, kernel)
        else:
            found = keras.ops.einsum(equation, x, kernel)
    gradients = torch.autograd.grad((found * found).sum(), (x, kernel))
    values = [each.full_tensor().detach().numpy() for each in (found, *gradients)]
    return values, [str(each) for each in found.placements], dict(traffic.calls)


# How the first and the last dim of the kernel are sharded, and what the product then gathers.
SPECS = {
    "replicated": (None, None, {}),
    "over the rows' axis": ("data", None, {"all_gather": 1}),
    "rows over the tokens' axis": ("model", None, None),
    # The smaller operand: the tokens of a rank, if the kernel is wide.
    "columns over the tokens' axis": (None, "model", {"all_gather": 1}),
}


@pytest.mark.parametrize("sharding", SPECS)
def test_values_and_gradients_are_those_of_numpy(sharding):
    first, last, gathered = SPECS[sharding]
    cases = [("matmul", "abc,cd->abd"), *(("einsum", equation) for equation in KERNELS)]

    def program(rank):
        distribute((2, 2))
        specs = [(first, *[None] * (KERNELS[e].ndim - 2), last) for _, e in cases]
        return [product(*case, spec) for case, spec in zip(cases, specs, strict=True)]

    for results in run_ranks(program, 4):
        for (kind, equation), (values, places, moved) in zip(cases, results, strict=True):
            kernel = KERNELS[equation]
            expected = np.tensordot(X, kernel, axes=1)
            of_x = np.tensordot(
                2 * expected, kernel, (range(2, expected.ndim), range(1, kernel.ndim))
            )
            of_kernel = np.tensordot(X, 2 * expected, ((0, 1), (0, 1)))
            for value, wanted in zip(values, (expected, of_x, of_kernel), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5, err_msg=kind)
            gathers_tokens = last == "model" and kernel.size > X.size
            assert places[:2] == ["S(0)", "S(2)" if gathers_tokens else "S(1)"]
            assert gathered is None or moved == gathered


# --- batches of products, over rows and heads -----------------------------------------------------


def by_math(*operands):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*operands)


def flattened(q, k, v):
    """Products of flattened rows and heads, and what stands between them."""
    q, k, v = (each.reshape(-1, *each.shape[-2:]) for each in (q, k, v))
    scores = torch.baddbmm(torch.ones(()), q, k.transpose(1, 2), beta=0.5, alpha=0.2)
    scores = F.dropout(scores.masked_fill(torch.ones(5, 5).triu(1) > 0, -9.0).softmax(-1), 0.4)
    return (scores @ v).permute(1, 0, 2)


# Rows, heads, tokens, channels. On the mesh of (2, 2) ranks have 4 or 3 rows; 2 heads or 1. A
# rank has one row of two, so that it has consecutive elements of the flattened dim.
PRODUCTS = {
    "einsum": lambda q, k, v: torch.einsum(
        "acbe,aecd->abcd", torch.einsum("aecd,abcd->acbe", k, q), v
    ),
    "matmul": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "math": by_math,
    "flattened": flattened,
    "linear": lambda q, k, v: F.linear(q * k, torch.arange(12.0).reshape(3, 4)) * v[..., :3],
    "joined with tokens": lambda q, k, v: (q * k).reshape(-1, 4).cos().view(v.shape) @ v.mT,
}
BATCHES = {(7, 3, 5, 4): (2, 2), (2, 4, 5, 4): (2, 2), (7, 4, 5, 4): (1, 4)}
# The last rank has none of six heads, so that they are sharded otherwise.
WITHOUT_HEADS = {(3, 6, 5, 4): (1, 4)}


def of_batches(rank, shape, mesh):
    """Of each product the result and the gradients; what all of them move."""
    if mesh:
        distribute(mesh)
    found, moved = {}, {}
    for name, run in PRODUCTS.items():
        dims = (0, 2, 1, 3) if name == "einsum" else (0, 1, 2, 3)  # it has tokens before heads
        torch.manual_seed(0)
        whole = torch.randn(3, *shape).permute(0, *(1 + dim for dim in dims)).contiguous()
        spec = ["data", "model", None, None]
        operands = [
            shardcore.distribute_tensor(each, [spec[dim] for dim in dims]) if mesh else each.clone()
            for each in whole
        ]
        operands = [each.requires_grad_() for each in operands]
        keras.utils.set_random_seed(1)
        with count_collectives() as traffic:
            result = run(*operands)
            gradients = torch.autograd.grad(result.cos(), operands, result.sin())
        found[name] = [
            (each.full_tensor() if mesh else each).detach().numpy() for each in (result, *gradients)
        ]
        moved[name] = dict(traffic.calls)
    return found, moved


@pytest.mark.parametrize("shape", [*BATCHES, *WITHOUT_HEADS], ids=str)
def test_products_of_rows_and_heads_move_nothing(shape):
    ((expected, _),) = run_ranks(of_batches, 1, shape, None)
    for found, moved in run_ranks(of_batches, 4, shape, (BATCHES | WITHOUT_HEADS)[shape]):
        assert shape in WITHOUT_HEADS or not any(moved.values())
        for name, values in expected.items():
            for one, other in zip(found[name], values, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
