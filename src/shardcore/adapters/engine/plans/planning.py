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
from shardcore.adapters.engine.plans.plan import Plan
from shardcore.adapters.engine.plans.task import Compute, Operand, Operator, Task
from shardcore.adapters.engine.redistribution import Redistribution
from shardcore.adapters.engine.tensor import Form, ShardedTensor
from shardcore.domain.engine.call import PlacedTensor, Shapes
from shardcore.domain.engine.choice import Sharding, choose
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.layouts.derived_layouts import are_free, pending_in_results, with_pending
from shardcore.domain.layouts.layout import Layout, PartialAxes


def plan_task(operator: Operator, task: Task, engine: Engine) -> Plan:
    """Returns the plan of an operator by its rule, with the cheapest sharding."""
    forms = _forms(task)
    layouts = [form.layout for form in forms]
    pending = pending_in_results(layouts, task.linear_in, task.adds)
    given = [_reduced(form, engine) for form in forms] if pending else forms
    sharding = _sharding(task, given, engine)
    if not are_free((*sharding.operands, *sharding.results), pending):
        pending = ()
        sharding = _sharding(task, forms, engine)
    uses = tuple(
        _use(task, position, form, target, pending, engine)
        for position, (form, target) in enumerate(zip(forms, sharding.operands, strict=True))
    )
    if task.over is not None:
        task = attrs.evolve(task, compute=task.over(engine, sharding))
    return Plan(operator, engine, task, uses, sharding, pending)


def _use(
    task: Task, position: int, form: Form, target: Layout, pending: PartialAxes, engine: Engine
) -> tuple[int, Redistribution | None, bool]:
    """Returns how the operand at `position` is used; see `Plan.uses`."""
    operand, source = task.operands[position], form
    if position in task.adds:
        # A partial operand stays as it is; only another one becomes zeros on other ranks.
        target = with_pending(target, pending) if pending else target
    elif pending:
        source = _reduced(form, engine)
    move = _move(source, target, engine)
    copy = operand.other
    if copy is None:
        return operand.number, move, False
    # An operand that stays partial is not replaced by its reduced copy.
    stays = target.partial or (pending and operand.form.layout.partial)
    if copy is form or (move is not None and not stays):
        return operand.number, _move(copy, target, engine), True
    return operand.number, move, False


def _reduced(form: Form, engine: Engine) -> Form:
    return engine.evolved(form, layout=form.layout.reduced)


def run_rule(
    operator: Operator,
    rule: OperatorRule,
    tensors: Sequence[torch.Tensor],
    compute: Compute,
    result_shapes: Shapes = (),
) -> list[Any]:
    """Runs `compute` on the local shards of `tensors`, sharded by `rule`; see `Task`."""
    engine: Engine = next(tensor.engine for tensor in tensors if isinstance(tensor, ShardedTensor))
    sharded = [engine.as_sharded(tensor) for tensor in tensors]
    operands = [Operand(tensor.form, number) for number, tensor in enumerate(sharded)]
    return plan_task(operator, Task(rule, operands, compute, result_shapes), engine).run(sharded)


def _forms(task: Task) -> list[Form]:
    """Returns the forms of the operands; a product uses redistributed copies of some."""
    sums = any(task.rule.sums(result) for result in task.rule.results)
    is_product = sums and len(task.operands) > 1
    return [
        operand.other if is_product and operand.serves and operand.other else operand.form
        for operand in task.operands
    ]


def _move(form: Form, layout: Layout, engine: Engine) -> Redistribution | None:
    """Returns the redistribution of a tensor; with a cache per step, a weight serves its transpose.

    Else the backward pass all-gathers it again: the cache does not hold it until then.
    """
    held = form.weight and engine.unsharded.holds_steps
    return (Redistribution.of_weight if held else Redistribution.to)(form, layout, engine)


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
        PlacedTensor(
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
