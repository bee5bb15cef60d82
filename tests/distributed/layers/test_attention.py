"""Attention on a mesh: the values and gradients of one device, however it is sharded and masked."""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute, placements
from tests.fallbacks import fallbacks

RNG = np.random.default_rng(0)
BATCH, HEADS, LENGTH, SIZE = 4, 4, 6, 8
OPERANDS = [RNG.normal(size=(BATCH, HEADS, LENGTH, SIZE)).astype("float32") for _ in range(4)]
# How query, key and value are sharded, and how the output then is.
SHARDINGS = {
    "batch": (("data", None, None, None), "S(0) R"),
    "heads": ((None, "model", None, None), "R S(1)"),
    "both": (("data", "model", None, None), "S(0) S(1)"),
    "heads by both axes": ((None, ("data", "model"), None, None), "S(1) S(1)"),
    "length": ((None, "model", "data", None), "S(2) S(1)"),
    "size": (("data", None, None, "model"), "S(0) S(1)"),
}
MASK_SHAPES = [
    (LENGTH, LENGTH),
    (BATCH, 1, LENGTH, LENGTH),
    (1, HEADS, LENGTH, LENGTH),
    (BATCH, HEADS, LENGTH, LENGTH),
    (BATCH, 1, 1, LENGTH),
    (1, 1, LENGTH, LENGTH),
]
MASKS = {shape: RNG.uniform(size=shape) > 0.3 for shape in MASK_SHAPES}
for each in MASKS.values():
    each[..., 0] = True  # no query without a key


def attend(spec, mask, mask_spec, causal, bias):
    """The output and the gradients of query, key and value; plain if `spec` is None."""
    tensors = [torch.as_tensor(value) for value in OPERANDS]
    if spec is not None:
        tensors = [shardcore.distribute_tensor(tensor, spec) for tensor in tensors]
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    given = None if mask is None else torch.as_tensor(MASKS[mask])
    if bias and given is not None:
        given = torch.where(given, 0.5, -2.0)
    if mask_spec is not None:
        given = shardcore.distribute_tensor(given, mask_spec)
    output = scaled_dot_product_attention(query, key, value, attn_mask=given, is_causal=causal)
    gradients = torch.autograd.grad((output * tensors[3]).sum(), (query, key, value))
    return output, gradients


def all_cases(rank, cases, mesh):
    if mesh:
        distribute(mesh)
    values, places = {}, {}
    for name, (spec, *rest) in cases.items():
        output, gradients = attend(spec, *rest) if mesh else attend(None, rest[0], None, *rest[2:])
        results = zip(("output", "query", "key", "value"), (output, *gradients), strict=True)
        values |= {f"{name}: {what}": value for what, value in results}
        places[name] = placements(output)
    return as_arrays(values), places


def assert_as_on_one_device(cases):
    ((reference, _),) = run_ranks(all_cases, 1, cases, None)
    results = run_ranks(all_cases, 4, cases, (2, 2))
    assert_close([values for values, _ in results], reference)
    return [places for _, places in results]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_sharding(causal):
    cases = {name: (spec, None, None, causal, False) for name, (spec, _) in SHARDINGS.items()}
    for places in assert_as_on_one_device(cases):
        assert places == {name: placed for name, (_, placed) in SHARDINGS.items()}


def test_every_shape_of_a_mask_plain_and_sharded():
    sharding = ("data", "model", None, None)
    cases = {}
    for shape in MASK_SHAPES:
        fitting = [axis if size > 1 else None for size, axis in zip(shape, sharding, strict=False)]
        mask_spec = tuple(fitting) if len(shape) == 4 else ("model", None)
        cases[f"plain {shape}"] = (sharding, shape, None, False, False)
        cases[f"sharded {shape}"] = (sharding, shape, mask_spec, False, False)
        cases[f"bias {shape}"] = (sharding, shape, mask_spec, False, True)
    for places in assert_as_on_one_device(cases):
        assert set(places.values()) == {"S(0) S(1)"}


def by_products(rank, specs):
    """Attention that torch computes by products, with a query whose keys are all masked."""
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[2] = False
    if specs:
        distribute((1, 2))
    values = {}
    for spec in specs or [None]:
        tensors = [torch.as_tensor(value) for value in OPERANDS]
        if spec:
            tensors = [shardcore.distribute_tensor(tensor, spec) for tensor in tensors]
        query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
        with sdpa_kernel(SDPBackend.MATH):
            output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        found = torch.autograd.grad((output * tensors[3]).sum(), (query, key, value))
        values[spec] = as_arrays([output, *found])
    return values, dict(fallbacks())


def test_attention_by_products_is_sharded_and_rows_without_a_key_are_zeros():
    heads, size = (None, "model", None, None), (None, None, None, "model")
    ((values, _),) = run_ranks(by_products, 1, ())
    expected = values[None]
    assert not expected[0][:, :, 2].any()
    for values, fallen_back in run_ranks(by_products, 2, (heads, size)):
        assert fallen_back == {}
        for spec in (heads, size):
            for found, one in zip(values[spec], expected, strict=True):
                np.testing.assert_allclose(found, one, rtol=0, atol=1e-5, err_msg=str(spec))


def softmax_of_parts(rank, is_sharded):
    scores = torch.as_tensor(OPERANDS[0][0, 0]).masked_fill(torch.eye(LENGTH, SIZE) > 0, -torch.inf)
    scores[3] = -torch.inf
    if is_sharded:
        distribute((1, 2))
        scores = shardcore.distribute_tensor(scores, (None, "model"))
    scores.requires_grad_()
    found = torch.ops.aten._safe_softmax(scores, 1)
    (gradient,) = torch.autograd.grad((found * found.exp()).sum(), scores)
    return as_arrays([found, gradient]), dict(fallbacks())


def test_the_softmax_of_attention_along_a_sharded_dim():
    ((expected, _),) = run_ranks(softmax_of_parts, 1, False)
    for values, fallen_back in run_ranks(softmax_of_parts, 2, True):
        assert fallen_back == {}
        for found, one in zip(values, expected, strict=True):
            np.testing.assert_allclose(found, one, rtol=0, atol=1e-6)
