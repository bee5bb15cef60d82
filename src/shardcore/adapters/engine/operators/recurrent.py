"""Recurrent layers by cuDNN, and their gradient: sharded by the batch.

For its gradient cuDNN keeps a tensor that only cuDNN reads, for the rows of one call. Each rank
gives its tensor to the gradient, which is sharded as the output is.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardcore.adapters.engine.task import Operand, Operator, Parts, Planner, Task
from shardcore.adapters.torch_private import Args, Kwargs, arguments_of, unnamed_operators
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import shard_as
from shardcore.domain.engine.rules import layers

# What the layers make for their gradient: all weights in one tensor, and states of the steps.
_SAVED_FOR_GRADIENT = ("weight_buf", "reserve")
_GRADIENTS = ("grad_output", "grad_hy", "grad_cy")
# The dims of output and gradient of the input in memory: cuDNN computes step by step.
_BY_STEPS = (1, 0, 2)


def _forward(operator: Operator, *args: object, **kwargs: object) -> Task | None:
    call = _call(operator, args, kwargs)
    if call is None:
        return None
    weights, first = call["weight"], call["batch_first"]
    if not all(weight.form.is_replicated for weight in weights):
        call["weight_buf"] = None  # torch made it of the memory of a sharded tensor, which has none
    named = _named(call, ("input", "hx", "cx", "weight_buf"))
    dims = tuple(weight.ndim for weight in weights)
    rule = layers.recurrent(first, dims, "cx" in named, "weight_buf" in named)

    def compute(parts: Parts) -> Sequence[Any]:
        return _run(operator, call, named, parts)

    return Task(rule, [*named.values(), *weights], compute, orders=_orders(first))


def _backward(operator: Operator, *args: object, **kwargs: object) -> Task | None:
    call = _call(operator, args, kwargs)
    if call is None:
        return None
    weights, first = call["weight"], call["batch_first"]
    named = _named(call, ("input", "hx", "cx", "output", *_GRADIENTS, *_SAVED_FOR_GRADIENT))
    operands = [*named.values(), *weights]
    rule = layers.recurrent_backward(
        first,
        tuple(weight.ndim for weight in weights),
        "cx" in named,
        tuple(name in named for name in _GRADIENTS),
        sum(name in named for name in _SAVED_FOR_GRADIENT),
    )

    def compute(parts: Parts) -> Sequence[Any]:
        *gradients, of_weights = _run(operator, call, named, parts)
        return *gradients, *of_weights

    placed = tuple(
        PlacedTensor(operand.shape, operand.form.layout, weight=operand.form.weight)
        for operand in operands
    )
    sharding = shard_as(rule, placed, list(named).index("output"))
    return Task(rule, operands, compute, orders=_orders(first), layouts=sharding)


def _call(operator: Operator, args: Args, kwargs: Kwargs) -> dict[str, Any] | None:
    """Names the arguments; None if parts of the batch cannot be computed.

    With dropout between layers they cannot. Sequences of several lengths have one dim for both the
    batch and the steps.
    """
    call = arguments_of(operator, args, kwargs)
    if (call["dropout"] and call["train"]) or call["input"].ndim != 3:
        return None
    # torch 2.13 hands on the state of dropout that an earlier call of other layers made.
    return {**call, "dropout_state": None}


def _named(call: Mapping[str, Any], names: Iterable[str]) -> dict[str, Operand]:
    return {name: call[name] for name in names if isinstance(call[name], Operand)}


def _run(
    operator: Operator, call: Mapping[str, object], names: Iterable[str], parts: Parts
) -> Sequence[Any]:
    """Runs `operator` with `parts` in place of its tensor arguments: `names`, and the weights."""
    tensors: dict[str, Any] = dict(zip(names, parts, strict=False))
    local = {**call, **tensors, "weight": parts[len(tensors) :]}
    outputs: Sequence[Any] = operator(**local)
    return outputs


def _orders(batch_first: bool) -> list[tuple[int, ...] | None]:
    return [_BY_STEPS] if batch_first else []


PLANNERS: dict[Any, Planner] = {
    unnamed_operators.CUDNN_RECURRENT: _forward,
    unnamed_operators.CUDNN_RECURRENT_BACKWARD: _backward,
}
