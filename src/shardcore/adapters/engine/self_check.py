"""A check of a dozen operators on a mesh of one, which needs no process group."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.local_shards import LocalShards
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import tree_leaves
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.world import World

# By name, functions of two matrices of 4 rows and 4 columns.
OPERATORS: tuple[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    ("add", lambda x, y: x + y),
    ("cat", lambda x, y: torch.cat([x, y])),
    ("conv1d", lambda x, y: functional.conv1d(x[None], y[..., None])),
    ("cross_entropy", lambda x, y: functional.cross_entropy(x, y.detach().argmax(1))),
    ("embedding", lambda x, y: functional.embedding(y.detach().argmax(1), x)),
    ("layer_norm", lambda x, y: functional.layer_norm(x, (4,), y[0], y[1])),
    ("linear", lambda x, y: functional.linear(x, y, y[0])),
    ("matmul", lambda x, y: x @ y),
    ("mean", lambda x, y: (x * y).mean(0)),
    ("relu", lambda x, y: x.relu()),
    ("reshape", lambda x, y: x.t().reshape(2, 8)),
    ("softmax", lambda x, y: x.softmax(1)),
    ("where", lambda x, y: torch.where(x > 0, x, y)),
)


def wrong_operators() -> Iterator[str]:
    """Yields the operators whose results or gradients are not those on plain tensors, and why."""
    engine = Engine(World(Mesh((1,), ("data",)), (0,), 0, "cpu"), {}, LocalShards())
    plain = list(torch.linspace(-1, 2, 32, device="cpu").reshape(2, 4, 4))
    for name, operator in OPERATORS:
        try:
            expected = _run(operator, [tensor.clone() for tensor in plain])
            sharded = _run(operator, [engine.replicated(tensor.clone()) for tensor in plain])
            values = [tensor.part for tensor in sharded if isinstance(tensor, ShardedTensor)]
            if len(values) != len(expected):
                yield f"operator {name}: its results are not sharded tensors"
            elif not all(map(torch.allclose, values, expected)):
                yield f"operator {name}: wrong numbers"
        except Exception as error:  # noqa: BLE001 - a newer torch may raise anything
            yield " ".join(f"operator {name}: {type(error).__name__}: {error}".split())


def _run(operator: Callable[..., torch.Tensor], operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Computes the result, and the gradients by its autograd node.

    A backward pass would start the threads of autograd, after which a fork of this process could
    run none.
    """
    # For any mode in which shardcore is installed.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        result = operator(*(operand.detach().requires_grad_() for operand in operands))
        node: Any = result.grad_fn  # the stubs of torch do not allow this call
        gradients = node(torch.ones_like(result.detach()))
    return [
        result,
        *(gradient for gradient in tree_leaves(gradients) if isinstance(gradient, torch.Tensor)),
    ]
