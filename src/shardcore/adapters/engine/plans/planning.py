"""Plans operators by their sharding rules.

A plan depends only on the forms of the operands and on numbers, so that one plan serves all equal
calls.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.redistribution import Redistribution
from shardcore.adapters.engine.plans.plan import Plan, with_pending
from shardcore.adapters.engine.plans.task import Compute, Operand, Operator, Task
from shardcore.adapters.engine.tensor import Form, ShardedTensor
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.placements import Replicate
from shardcore.domain.planner.call import Placed, Shapes
from shardcore.domain.planner.choice import Sharding, choose
from shardcore.domain.rules.rule import OperatorRule


def planned(operator: Operator, task: Task, engine: Engine) -> Plan:
    """Returns the plan of an operator by its rule, with the cheapest sharding."""
    forms = _forms(task)
    pending = _pending_in_results(task, forms)
    given = [
        engine.evolved(form, layout=form.layout.reduced) if pending else form for form in forms
    ]
    sharding = _sharding(task, given, engine)
    if pending and any(_uses(each, pending) for each in (*sharding.operands, *sharding.results)):
        pending, given = (), forms
        sharding = _sharding(task, forms, engine)
    targets = [
        with_pending(layout, pending) if pending and place in task.adds else layout
        for place, layout in enumerate(sharding.operands)
    ]
    # A partial operand stays as it is; only another one becomes zeros on other ranks.
    sources = [
        engine.evolved(form, layout=with_pending(form.layout, pending))
        if pending and place in task.adds and forms[place].layout.partial
        else form
        for place, form in enumerate(given)
    ]
    uses = []
    for each, form, source, target in zip(task.operands, forms, sources, targets, strict=True):
        move = _move(source, target, engine)
        other = each.other
        # An operand that stays partial is not replaced by its reduced copy.
        stays = target.partial or (pending and each.form.layout.partial)
        uses_copy = other is form or not (other is None or move is None or stays)
        if uses_copy and other is not None:
            move = _move(other, target, engine)
        uses.append((each.number, move, uses_copy))
    if task.over is not None:
        task = attrs.evolve(task, compute=task.over(engine, sharding))
    return Plan(operator, engine, task, tuple(uses), sharding, pending)


def run_rule(
    operator: Operator,
    rule: OperatorRule,
    tensors: Sequence[torch.Tensor],
    compute: Compute,
    result_shapes: Shapes = (),
) -> list[Any]:
    """Runs `compute` on the local shards of `tensors`, sharded by `rule`; see `Task`."""
    engine: Engine = next(each.engine for each in tensors if isinstance(each, ShardedTensor))
    sharded = [engine.as_sharded(each) for each in tensors]
    operands = [Operand(each.form, number) for number, each in enumerate(sharded)]
    return planned(operator, Task(rule, operands, compute, result_shapes), engine).run(sharded)


def _forms(task: Task) -> list[Form]:
    """Returns the forms of the operands; a product uses redistributed copies of some."""
    sums = any(task.rule.sums(result) for result in task.rule.results)
    is_product = sums and len(task.operands) > 1
    return [
        each.other if is_product and each.serves and each.other else each.form
        for each in task.operands
    ]


def _move(form: Form, layout: Layout, engine: Engine) -> Redistribution | None:
    """Returns the redistribution of a tensor; with a cache per step, a weight serves its transpose.

    Else the backward pass all-gathers it again: the cache does not hold it until then.
    """
    held = form.weight and engine.unsharded.holds_steps
    return (Redistribution.of_weight if held else Redistribution.to)(form, layout, engine)


def _pending_in_results(task: Task, forms: Sequence[Form]) -> PartialAxes:
    """Returns the reductions of operands that stay pending in the results."""
    places = [place for place, form in enumerate(forms) if form.layout.partial]
    kinds = {forms[place].layout.partial for place in places}
    if len(kinds) != 1:
        return ()
    (pending,) = kinds
    if not {op for _, op in pending} <= {"sum", "avg"}:
        return ()
    if len(places) == 1 and places[0] in task.linear_in:
        return pending
    if not task.adds or not set(places) <= set(task.adds):
        return ()
    # The first rank adds operands that are not partial: to a sum, and not to a mean.
    only_sums = {op for _, op in pending} == {"sum"}
    return pending if only_sums or len(places) == len(task.adds) else ()


def _uses(layout: Layout, pending: PartialAxes) -> bool:
    """Returns whether `layout` already uses an axis of `pending`."""
    return any(not isinstance(layout.placement(axis), Replicate) for axis, _ in pending)


def _sharding(task: Task, forms: Sequence[Form], engine: Engine) -> Sharding:
    if task.layouts is not None:
        return task.layouts
    if engine.gathers and not all(form.weight or not form.ndim for form in forms):
        gathered = partial(Layout.replicated, engine.world.mesh)
        forms = [
            engine.evolved(form, layout=gathered(form.ndim)) if form.weight else form
            for form in forms
        ]
    placed = tuple(
        Placed(
            form.shape,
            form.layout,
            form.dtype.itemsize,
            form.weight,
            None if operand.other is None else operand.other.layout,
            form.repeats,
        )
        for form, operand in zip(forms, task.operands, strict=True)
    )
    if task.ring is not None:
        return task.ring.sharding(task.rule, placed, engine.costs)
    return choose(task.rule, placed, task.result_shapes, task.scales, engine.costs)
