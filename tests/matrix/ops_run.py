"""One case of the matrix on one rank: the call in a layout beside the call on one device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from keras import tree

import shardcore
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.strategy import ShardedTensors
from shardcore.ports.world import World
from tests.matrix import counting, strategies
from tests.matrix.cases.ops import Case, Operand, public_functions
from tests.matrix.forks import Ended, run_all
from tests.matrix.outcomes import Outcome, worst
from tests.matrix.placing import assignments, place

Found = dict[str, Outcome]  # by call


def over_mesh(cases: dict[str, list[Case]], mesh: Mesh) -> Found:
    """The outcome of each function's calls, in all layouts."""
    items = {name: (name, variants) for name, variants in cases.items()}
    found: Found = {}
    for name, result in run_all(items, mesh.size, partial(_start, mesh), _failed).items():
        found |= {name: Outcome("error", result.why)} if isinstance(result, Ended) else _of(result)
    return found


def _start(mesh: Mesh, rank: int) -> Callable[[tuple[str, list[Case]]], Found]:
    shardcore.install(strategies.name())
    device_mesh = keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names)
    layout_map = keras.distribution.LayoutMap(device_mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )
    world = World(mesh, tuple(range(mesh.size)), rank, "cpu")
    tensors = strategies.tensors(world)
    functions = public_functions()

    def run(item: tuple[str, list[Case]]) -> Found:
        name, variants = item
        return {
            f"{name}[{at}] {_named(chosen)}": outcome
            for at, case in enumerate(variants)
            for chosen, outcome in run_case(tensors, world, case, functions.get(name))
        }

    return run


def _failed(found: Found) -> bool:
    return any(outcome.status == "error" for outcome in found.values())


def _of(ranks: list[Found]) -> Found:
    assert len({tuple(found) for found in ranks}) == 1, "ranks ran different calls"
    return {call: worst(found[call] for found in ranks) for call in ranks[0]}


def run_case(
    tensors: ShardedTensors, world: World, case: Case, function: Callable[..., Any] | None
) -> list[tuple[Sequence[Layout | None], Outcome]]:
    values = [
        operand.value(seed)
        for seed, operand in enumerate(tree.flatten((case.args, case.kwargs)))
        if isinstance(operand, Operand)
    ]
    function = case.function or function
    try:
        call = _with_gradients
        results, expected = call(function, case, [torch.tensor(value) for value in values])
    except RuntimeError:  # torch has no gradient of it
        call = _call
        results, expected = call(function, case, [torch.tensor(value) for value in values])
    read = _read_on(results)
    return [
        (chosen, _outcome(tensors, world, call, function, case, values, chosen, expected, read))
        for chosen in assignments(world.mesh, values)
    ]


def _outcome(tensors, world, call, function, case, values, chosen, expected, read) -> Outcome:
    counting.begin()
    try:
        with tensors.implicit_replication():
            placed = [
                place(tensors, world, value, wanted)
                for value, wanted in zip(values, chosen, strict=True)
            ]
            results, found = call(function, case, placed)
            right = counting.right()
            wrong = difference(found, expected)
            if not wrong:
                wrong = difference(_read_on(results), read, "read on, #")
    except Exception as error:  # noqa: BLE001 - the matrix reports them
        return Outcome("error", f"{type(error).__name__}: {error}".partition("\n\n")[0])
    return Outcome("WRONG", wrong) if wrong else right


def _with_gradients(
    function: Callable[..., Any], case: Case, operands: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The results; they and the gradients of their sum of squares, whole, as NumPy."""
    for operand in operands:
        if operand.is_floating_point():
            operand.requires_grad_()
    results = _results(function, case, operands)
    loss = _loss(results)
    if loss is not None:
        loss.backward()
    return results, [whole(leaf) for leaf in (*results, *(operand.grad for operand in operands))]


def _call(
    function: Callable[..., Any], case: Case, operands: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The results, as they come and whole, as NumPy."""
    results = _results(function, case, operands)
    return results, [whole(leaf) for leaf in results]


def _read_on(results: list[Any]) -> list[Any]:
    """Applies a following operator to each result, which may be sharded or partial.

    A result that is right as a whole may be pending as what it is not: a truth value as a number
    that adds up, a norm as a sum.
    """
    tensors = [each.detach() for each in results if isinstance(each, torch.Tensor)]
    return [
        whole(leaf)
        for tensor in tensors
        if not tensor.is_complex()
        for leaf in (
            tensor.float().sum() / max(tensor.numel(), 1),
            1 - tensor.float(),
            torch.empty_like(tensor).fill_(1),
        )
    ]


def _results(function: Callable[..., Any], case: Case, operands: list[Any]) -> list[Any]:
    torch.manual_seed(0)  # some functions draw
    remaining = iter(operands)
    args, kwargs = tree.map_structure(
        lambda leaf: next(remaining) if isinstance(leaf, Operand) else leaf,
        (case.args, case.kwargs),
    )
    results: list[Any] = tree.flatten(function(*args, **kwargs))
    return results


def _loss(results: list[Any]) -> torch.Tensor | None:
    terms = [
        (torch.abs(result) if result.is_complex() else result).float().square().sum()
        for result in results
        if isinstance(result, torch.Tensor) and result.requires_grad
    ]
    return sum(terms[1:], start=terms[0]) if terms else None


def whole(leaf: Any) -> Any:
    """The full tensor; what is no tensor stays."""
    if strategies.is_sharded(leaf):
        leaf = strategies.whole(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().resolve_conj()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()


def difference(found: list[Any], expected: list[Any], name: str = "#") -> str:
    """Describes how the results differ; "" if they do not."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(other, np.ndarray):
            if one != other:
                return f"{name}{at}: {one!r} instead of {other!r}"
            continue
        array = np.asarray(one)
        if (array.shape, array.dtype) != (other.shape, other.dtype):
            return f"{name}{at}: {array.dtype}{array.shape} instead of {other.dtype}{other.shape}"
        if not np.allclose(array, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name}{at}: off by {np.nanmax(np.abs(array - other * 1.0)):.3g}"
    return ""


def _named(chosen: Sequence[Layout | None]) -> str:
    return " ".join("plain" if each is None else f"({each})" for each in chosen)
