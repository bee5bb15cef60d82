"""Products of operands with two split dims: the numbers of NumPy, and no line is moved."""

import keras
import numpy as np
import pytest
import torch

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


# How the first and the last dim of the kernel are split, and what the product then gathers.
SPECS = {
    "replicated": (None, None, {}),
    "over the rows' axis": ("data", None, {"all_gather": 1}),
    "rows over the tokens' axis": ("model", None, None),
    "columns over the tokens' axis": (None, "model", None),
}


@pytest.mark.parametrize("split", SPECS)
def test_values_and_gradients_are_those_of_numpy(split):
    first, last, gathered = SPECS[split]
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
            assert places[:2] == ["S(0)", "S(1)"]
            assert gathered is None or moved == gathered
