"""One case of the matrix on one rank: the call in a layout beside the call on one device."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from keras import tree
from torch.distributed.tensor import DTensor

from shardcore.adapters import fallback
from shardcore.adapters.dtensor import DTensors
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.ports.world import World
from tests.matrix.ops_cases import Case, Operand, public_functions
from tests.matrix.placing import assignments, place

Results = dict[str, Counter]


@attrs.frozen
class Outcome:
    """What came of one call in one layout."""

    verdict: str  # "ok", "fell back", "error", "WRONG"
    detail: str = ""


def run_cases(
    rank: int, mesh: Mesh, cases: dict[str, list[Case]]
) -> list[tuple[str, str, Outcome]]:
    """All cases in all layouts, on this rank: function, case with layouts, outcome."""
    world = World(mesh, tuple(range(mesh.size)), rank, "cpu")
    tensors, functions = DTensors(world), public_functions()
    warnings.simplefilter("ignore")
    return [
        (name, f"{name}[{at}] {_named(chosen)}", outcome)
        for name, variants in cases.items()
        for at, case in enumerate(variants)
        for chosen, outcome in run_case(tensors, case, functions[name])
    ]


def run_case(
    tensors: DTensors, case: Case, function: Callable[..., Any]
) -> list[tuple[Sequence[Layout | None], Outcome]]:
    values = [
        operand.value(seed)
        for seed, operand in enumerate(tree.flatten((case.args, case.kwargs)))
        if isinstance(operand, Operand)
    ]
    function = case.function or function
    try:
        call = _with_gradients
        expected = call(function, case, [torch.tensor(value) for value in values])
    except RuntimeError:  # torch has no gradient of it
        call = _call
        expected = call(function, case, [torch.tensor(value) for value in values])
    return [
        (chosen, _outcome(tensors, call, function, case, values, chosen, expected))
        for chosen in assignments(tensors.world.mesh, values)
    ]


def _outcome(tensors, call, function, case, values, chosen, expected) -> Outcome:
    before = sum(fallback.CALLS.values())
    try:
        with tensors.promotion():
            placed = [
                place(tensors, value, wanted) for value, wanted in zip(values, chosen, strict=True)
            ]
            found = call(function, case, placed)
    except Exception as error:  # noqa: BLE001 - the matrix tells them
        return Outcome("error", f"{type(error).__name__}: {error}".partition("\n\n")[0])
    wrong = difference(found, expected)
    if wrong:
        return Outcome("WRONG", wrong)
    fell_back = sum(fallback.CALLS.values()) > before
    return Outcome("fell back" if fell_back else "ok")


def _with_gradients(function: Callable[..., Any], case: Case, operands: list[Any]) -> list[Any]:
    """The results and the gradients of their sum of squares, whole, as NumPy."""
    for operand in operands:
        if operand.is_floating_point():
            operand.requires_grad_()
    results = _results(function, case, operands)
    loss = _loss(results)
    if loss is not None:
        loss.backward()
    return [whole(leaf) for leaf in (*results, *(operand.grad for operand in operands))]


def _call(function: Callable[..., Any], case: Case, operands: list[Any]) -> list[Any]:
    """The results, whole, as NumPy."""
    return [whole(leaf) for leaf in _results(function, case, operands)]


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
    """The whole value; what is no tensor stays."""
    if isinstance(leaf, DTensor):
        leaf = leaf.detach().full_tensor()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().resolve_conj()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()


def difference(found: list[Any], expected: list[Any]) -> str:
    """How the results differ; "" if they do not."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(other, np.ndarray):
            if one != other:
                return f"#{at}: {one!r} instead of {other!r}"
            continue
        array = np.asarray(one)
        if (array.shape, array.dtype) != (other.shape, other.dtype):
            return f"#{at}: {array.dtype}{array.shape} instead of {other.dtype}{other.shape}"
        if not np.allclose(array, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"#{at}: off by {np.nanmax(np.abs(array - other * 1.0)):.3g}"
    return ""


def _named(chosen: Sequence[Layout | None]) -> str:
    return " ".join("plain" if each is None else f"({each})" for each in chosen)
