"""Runs an operator on sharded tensors: by a plan, which is made once, or a handler (ADR 23)."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, partial
from math import isfinite
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.declared import rules as declared
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.operators import HANDLERS, PLANNERS, foreach, pointwise
from shardcore.adapters.engine.plan import Plan, plan_task
from shardcore.adapters.engine.redistribution import Redistributed, find_copy
from shardcore.adapters.engine.task import Handler, Operator, Planner, operand, with_tensors
from shardcore.adapters.engine.tensor import ShardedTensor, is_dense
from shardcore.adapters.engine.writes import note_view, refresh, run_full, run_full_and_store, write
from shardcore.adapters.torch_private.signatures import is_operator, signature_of, why_no_rule
from shardcore.domain.errors import ArgumentProblem, ShardedTensorError

aten = torch.ops.aten

# They return the tensor itself, without its history.
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


@attrs.frozen(eq=False)
class _Route:
    """The planner of an operator, and what its plans depend on."""

    planner: Planner
    is_exact: bool  # whether its plan depends on the values of floats
    results: str  # the kind of its results, of `torch_private.kind_of_results`


def run(operator: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Runs `operator`; at least one operand is a sharded tensor."""
    route = _route(operator)
    if not isinstance(route, _Route):
        return route(operator, *args, **kwargs)
    engine = _engine(args, kwargs)
    tensors: list[Any] = []
    key = (route, *_key(args, tensors, engine, route.is_exact))
    if kwargs:
        key = (*key, *kwargs, *_key(kwargs.values(), tensors, engine, route.is_exact))
    known = _known_copies(tensors)
    if any(known):
        key = (*key, *((copy.tensor.form, copy.serves) if copy else None for copy in known))
    plan = engine.plans.get(key)
    if plan is None:
        plan = _plan(route.planner, operator, args, kwargs, tensors, known, engine)
        engine.remember(key, plan)
    if not isinstance(plan, Plan):
        return _run_handler(plan, operator, *args, **kwargs)
    results = plan.run(tensors, args, kwargs, known)
    if route.results == "tensor":
        return results[0]
    if route.results == "tuple with list":
        first = torch_private.number_of_results(operator) - 1
        return (*results[:first], results[first:])
    return results if route.results == "list" else tuple(results)


@cache
def _route(operator: Operator) -> _Route | Handler:
    if operator in _ALIASES:
        return _alias
    if torch_private.is_of_collectives(operator):
        return _refuse_collective
    is_elementwise = torch_private.is_elementwise(operator)
    planner, handler = PLANNERS.get(operator), HANDLERS.get(operator, run_full)
    if planner is None and handler is run_full:
        if torch_private.is_list_operator(operator):
            handler = foreach.on_list
        elif torch_private.writes_others(operator):
            handler = run_full_and_store
        elif torch_private.writes_first(operator):
            handler = write
        elif is_elementwise:
            planner = pointwise.plan
        elif torch_private.is_composite(operator):
            handler = _run_decomposed
        else:
            planner = declared.planner_of(operator)
    if planner is None:
        return partial(_run_handler, handler)
    return _Route(planner, not is_elementwise, torch_private.kind_of_results(operator))


def declare_rule(operator: object, text: object, compare: Callable[[str], None]) -> None:
    """Declares the sharding rule of an operator that shardcore has none for.

    A new rule is compared on all ranks by `compare`, which takes the call that declares it.

    Raises:
        ArgumentProblem: If it has one, if none can hold for it, or if `text` does not fit it.
    """
    if not is_operator(operator):
        raise ArgumentProblem(
            name="operator_rule(operator)",
            expected="an operator with its overload, such as torch.ops.mylib.scale.default",
            got=repr(operator),
            remedy="torch.library.custom_op and torch.library.Library make them",
        )
    before = declared.find(operator)
    reason, remedy = why_no_rule(operator), "it runs on full tensors"
    if reason is None and before is None and not _falls_back(_route(operator)):
        reason = "has a rule of shardcore, or is made of operators that have one"
        remedy = "it needs none of yours"
    if reason is not None:
        raise ArgumentProblem(
            name=f"operator_rule({operator})",
            expected="an operator of your own, which computes new tensors from its operands alone",
            got=f"one that {reason}",
            remedy=remedy,
        )
    rule = signature_of(operator).rule(text)
    if before not in (None, rule):
        raise ArgumentProblem(
            name=f"operator_rule({operator})",
            expected=f"one rule for an operator, which has {str(before)!r} already",
            got=repr(text),
            remedy="declare it at one place, where the operator is defined",
        )
    if before is None:
        compare(f"operator_rule({operator}, {str(rule)!r})")
        declared.add(operator, rule)
        _route.cache_clear()


def _falls_back(route: "_Route | Handler") -> bool:
    return isinstance(route, partial) and route.args == (run_full,)


def _refuse_collective(operator: Operator, *_args: object, **_kwargs: object) -> Any:
    raise ShardedTensorError(
        f"A collective of torch.distributed ({operator}) got a sharded tensor, of which ranks have "
        "other elements. A model under keras.distribution needs no DistributedDataParallel, no "
        "FSDP and no collective of your own: its gradients are reduced already. Give collectives "
        "plain tensors: to_local(), full_tensor()."
    )


def _alias(_operator: Operator, tensor: ShardedTensor) -> Any:
    refresh(tensor)
    same = tensor.engine.wrap(tensor.part, tensor.form, tensor.memory)
    if tensor.copied is not None or tensor.form.is_pending:
        note_view(same, tensor, lambda value: value, is_copy=tensor.form.is_pending)
    return same


def _run_decomposed(operator: Operator, *args: object, **kwargs: object) -> Any:
    """Runs a composed operator: its parts are dispatched one by one."""
    return operator.decompose(*args, **kwargs)


def _run_handler(handler: Handler, operator: Operator, *args: object, **kwargs: object) -> Any:
    engine = _engine(args, kwargs)
    all_dense = True

    def own(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal all_dense
        if isinstance(tensor, ShardedTensor):
            engine.check_mesh(tensor)
            refresh(tensor)
            return tensor
        adopted = engine.adopt(tensor)
        all_dense = all_dense and is_dense(tensor)
        return tensor if adopted is None else adopted

    args, kwargs = torch_private.tree_map_only(torch.Tensor, own, (args, kwargs))
    if not all_dense:
        written = torch_private.written_operands(operator, args, kwargs)
        stores = any(isinstance(target, ShardedTensor) for target in written)
        handler = run_full_and_store if stores else run_full
    with torch.no_grad():
        return handler(operator, *args, **kwargs)


def _engine(args: tuple[object, ...], kwargs: dict[str, object]) -> Engine:
    """Takes the engine of the first sharded tensor among the arguments, or in a list of them."""
    for arg in args:  # without a generator, which takes longer than the look-up of a plan
        if isinstance(arg, ShardedTensor):
            first = arg
            break
    else:
        leaves = torch_private.tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, ShardedTensor))
    engine: Engine = first.engine
    return engine


def _key(
    arguments: Iterable[Any], tensors: list[Any], engine: Engine, is_exact: bool
) -> list[Hashable]:
    """Builds the key of a plan for `arguments`; `tensors` gets their tensors, all as sharded.

    It gets no sparse and no nested ones: these have no layout.
    """
    key: list[Hashable] = []
    for argument in arguments:
        if isinstance(argument, ShardedTensor):
            if argument.copied is not None:
                refresh(argument)
            if argument.engine is not engine:
                engine.check_mesh(argument)
            tensors.append(argument)
            key.append(argument.form)
            continue
        kind = type(argument)
        if kind is int or argument is None:
            key.append(argument)
        elif isinstance(argument, torch.Tensor):
            if is_dense(argument):
                tensors.append(engine.as_sharded(argument))
                key.append(tensors[-1].form)
            else:
                key.append(run_full)  # whose key has no other plan
        elif kind is float and not is_exact and argument and isfinite(argument):
            key.append(float)
        elif isinstance(argument, list | tuple):
            key.append(tuple(_key(argument, tensors, engine, is_exact)))
        else:
            key.append((kind, argument))
    return key


def _known_copies(tensors: Sequence[ShardedTensor]) -> list[Redistributed | None]:
    """Looks up the redistributed copy of each tensor; nothing if no tensor has one."""
    for tensor in tensors:
        if tensor.memory.redistributed:
            return [find_copy(other) if other.memory.redistributed else None for other in tensors]
    return []


def _plan(
    planner: Planner,
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Any],
    known: list[Redistributed | None],
    engine: Engine,
) -> Plan | Handler:
    leaves = torch_private.tree_leaves((args, kwargs))
    if not all(is_dense(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return run_full
    numbers = enumerate(zip(tensors, known or [None] * len(tensors), strict=True))
    operands = iter(
        [operand(operator, tensor.form, number, copy) for number, (tensor, copy) in numbers]
    )
    of_args = tuple(with_tensors(arg, operands) for arg in args)
    of_kwargs = {name: with_tensors(arg, operands) for name, arg in kwargs.items()}
    task = planner(operator, *of_args, **of_kwargs)
    if task is None:
        return run_full
    return task if callable(task) else plan_task(operator, task, engine)
