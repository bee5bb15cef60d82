"""Plans of operators by their sharding rules: redistribute, compute, wrap (ADR 23).

A plan depends only on the forms of the operands and on numbers, so that one plan serves all equal
calls.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import torch

from shardcore.adapters.engine import redistribution
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistribution import Redistributed, Redistribution
from shardcore.adapters.engine.task import (
    Compute,
    Operand,
    Order,
    Task,
    in_order,
    tensor_positions,
    with_tensors,
)
from shardcore.adapters.engine.tensor import Form, ShardedTensor
from shardcore.adapters.engine.writes import note_view, warn_fallback
from shardcore.adapters.torch_private import Kwargs, Operator, is_view
from shardcore.domain.engine.call import PlacedTensor, Shapes
from shardcore.domain.engine.choice import Sharding, choose
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.layouts.derived_layouts import are_free, pending_in_results, with_pending
from shardcore.domain.layouts.layout import Layout, PartialAxes
from shardcore.domain.layouts.memory_order import strides_in

# They copy what has gaps, or another order, in memory.
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten.reshape.default}


@attrs.define(eq=False)
class _Result:
    """A result: its form, and the conversion from the local result."""

    form: Form
    # The dims of its local shard, outermost in memory first; None for their own order.
    order: Order | None
    shares: bool  # whether the local shard shares the memory of the operand's


@attrs.define(eq=False)
class Plan:
    """The plan of an operator for operands of certain forms."""

    operator: Any
    engine: Engine
    task: Task
    # Of each operand of the task: its number among the tensors of the call, its redistribution,
    # None if it needs none, and whether its redistributed copy is used.
    uses: tuple[tuple[int, Redistribution | None, bool], ...]
    sharding: Sharding  # the layouts of operands and results
    pending: PartialAxes  # the reductions of the operand that stay pending
    _numbers: tuple[int, ...] = attrs.field(init=False)
    _stays: bool = attrs.field(init=False)
    _is_view: bool = attrs.field(init=False)
    _falls_back: bool = attrs.field(init=False)
    _results: tuple[_Result | None, ...] | None = attrs.field(default=None, init=False)
    # The form of the result, if it is one and its local shard stays as it is computed.
    _only_form: Form | None = attrs.field(default=None, init=False)
    # The positions of the tensors among the arguments; empty if tensors are elsewhere too.
    _positions: tuple[int, ...] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._numbers = tuple(number for number, _, _ in self.uses)
        self._stays = not any(move or uses_copy for _, move, uses_copy in self.uses)
        self._is_view = is_view(self.operator)
        # A view of an all-gathered weight repeats no work on the ranks.
        self._falls_back = self.sharding.gathers and not self.task.makes_weights

    def __str__(self) -> str:
        """Writes the rule, and a line for each operand and result: its layouts and collectives."""
        rows = []
        operands = zip(self.task.operands, self.uses, self.sharding.operands, strict=True)
        for number, (operand, (_, move, uses_copy), layout) in enumerate(operands):
            steps = () if move is None else [step for _, steps in move.stages for step in steps]
            moves = [f"{step.kind} over {step.axis!r}" for step in steps]
            name = f"operand {number}" + (", a copy" if uses_copy else "")
            source = layout if move is None else move.form.layout
            target = "" if move is None else f"-> {move.target}"
            rows.append((name, f"{operand.shape}", f"{source}", target, ", ".join(moves)))
        for number, layout in enumerate(self.sharding.results):
            pending = with_pending(layout, self.pending) if self.pending else layout
            rows.append((f"result {number}", "", f"{pending}", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"{self.operator}: {self.task.rule}", *lines])

    def run(
        self,
        tensors: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Kwargs | None = None,
        known: Sequence[Redistributed | None] = (),
    ) -> list[Any]:
        """Runs the operator on `tensors`, whose forms are those of the plan.

        `known` has the redistributed copy of each tensor of the call, if there is one.
        """
        if self._falls_back:
            warn_fallback(self.operator, [tensors[number] for number in self._numbers])
        if self._stays:
            parts = [tensors[number].part for number in self._numbers]
        else:
            parts = []
            for number, move, uses_copy in self.uses:
                copy = known[number] if uses_copy else None
                tensor = copy.tensor if copy else tensors[number]
                if move is not None:
                    serves = self.sharding.replicates
                    parts.append(redistribution.redistribute_operand(tensor, move, serves))
                else:
                    parts.append(tensor.part)
        compute = self.task.compute
        outputs = compute(parts) if compute else self._call(parts, args, kwargs)
        if self._results is None:
            self._results = self._first_results(outputs)
            only = self._results[0] if len(self._results) == 1 else None
            self._only_form = None if only is None or only.order else only.form
        if self._is_view:
            number = self._numbers[0]
            return self._views(outputs, tensors[number], known[number] if known else None)
        if self._only_form is not None:
            return [self.engine.wrap(outputs[0], self._only_form)]
        wrap = self.engine.wrap
        return [
            part
            if part is None or result is None
            else wrap(in_order(part, result.order), result.form)
            for part, result in zip(outputs, self._results, strict=True)
        ]

    def _call(
        self, parts: list[torch.Tensor], args: tuple[object, ...], kwargs: Kwargs | None
    ) -> Any:
        if self._positions is None:
            self._positions = tensor_positions(args, kwargs)
        if self._positions:
            local_args = list(args)
            for position, part in zip(self._positions, parts, strict=True):
                local_args[position] = part
            named = kwargs
        else:
            left = iter(parts)
            local_args = [with_tensors(arg, left) for arg in args]
            named = kwargs and {name: with_tensors(arg, left) for name, arg in kwargs.items()}
        outputs = self.operator(*local_args, **named) if named else self.operator(*local_args)
        return outputs if isinstance(outputs, tuple | list) else (outputs,)

    def _views(
        self, outputs: Sequence[Any], operand: ShardedTensor, known: Redistributed | None
    ) -> list[Any]:
        assert self._results is not None
        results = []
        for number, (part, result) in enumerate(zip(outputs, self._results, strict=True)):
            assert result is not None
            made = part if result.shares else in_order(part, result.order)
            tensor = self.engine.wrap(made, result.form, operand.memory)
            is_copy = not result.shares or bool(self.pending)
            if is_copy or operand.copied is not None:
                assert self.task.compute is not None
                take = partial(_one_of, self.task.compute, number)
                note_view(tensor, operand, take, is_copy=is_copy)
            # A redistributed operand could not be sharded in its layout; nor can its copy.
            if known and self._stays:
                self._note_view(tensor, number, known)
            results.append(tensor)
        return results

    def _note_view(self, view: ShardedTensor, number: int, known: Redistributed) -> None:
        """Notes a copy of `view`, result `number`: the same view of the copy of its operand."""
        other, form, task = known.tensor, known.tensor.form, self.task
        sharding = choose(task.rule, (PlacedTensor(form.shape, form.layout),), task.result_shapes)
        if sharding.operands[0] != form.layout:  # the view would move the copy
            return
        compute = task.over(self.engine, sharding) if task.over else task.compute
        assert compute is not None
        part = compute([other.part])[number]
        assert part is not None
        layout = sharding.results[number]
        same = self.engine.wrap(part, self.engine.evolved(view.form, layout=layout), other.memory)
        redistribution.note_copy(view, same, known.serves)

    def _first_results(self, outputs: Sequence[Any]) -> tuple[_Result | None, ...]:
        strides = self._strides_of_views() if self._is_view else None
        rules = self.task.rule.results
        return tuple(
            None
            # CUDA returns a buffer of `log_sigmoid` that it does not use: it is empty.
            if part is None
            or number >= len(rules)
            or (part.shape == (0,) and len(rules[number].dims) != 1)
            else self._result(number, part, strides)
            for number, part in enumerate(outputs)
        )

    def _result(
        self, number: int, part: torch.Tensor, strides: Sequence[tuple[int, ...]] | None
    ) -> _Result:
        task, layout = self.task, self.sharding.results[number]
        shape = self.sharding.global_shape(task.rule.results[number], tuple(part.shape))
        if self.pending:
            layout = with_pending(layout, self.pending)
        form_of = partial(
            self.engine.form, shape, layout, part.dtype, part.device, weight=task.makes_weights
        )
        if strides is not None:
            return _Result(form_of(strides=strides[number]), None, shares=self._stays)
        order = task.orders[number] if number < len(task.orders) else None
        in_order = None if order is None else strides_in(order, shape)
        return _Result(form_of(strides=in_order), order, shares=False)

    def _strides_of_views(self) -> Sequence[tuple[int, ...]] | None:
        """Computes the strides of the views of the full tensor; None if the results are copies."""
        form, compute = self.task.operands[0].form, self.task.compute
        assert compute is not None, "a view takes other numbers for a local shard"
        if self.operator in _RESHAPES and not form.is_contiguous and not form.repeats:
            return None
        full = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
        return [tuple(view.stride()) for view in compute([full]) if view is not None]


def _one_of(compute: Compute, number: int, tensor: torch.Tensor) -> torch.Tensor:
    view: torch.Tensor = compute([tensor])[number]
    return view


def plan_task(operator: Operator, task: Task, engine: Engine) -> Plan:
    """Chooses the cheapest sharding by the rule, and plans the redistribution of the operands."""
    forms = task.forms
    layouts = [form.layout for form in forms]
    pending = pending_in_results(layouts, task.linear_in, task.adds)
    given = [_reduced(form, engine) for form in forms] if pending else forms
    sharding = task.sharding(given, engine)
    if not are_free((*sharding.operands, *sharding.results), pending):
        pending = ()
        sharding = task.sharding(forms, engine)
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
    """Plans the use of the operand at `position`; see `Plan.uses`."""
    operand, source = task.operands[position], form
    if position in task.adds:
        # A partial operand stays as it is; only another one becomes zeros on other ranks.
        target = with_pending(target, pending) if pending else target
    elif pending:
        source = _reduced(form, engine)
    move = _move(source, target, engine)
    # An operand that stays partial is not replaced by its reduced copy.
    stays = target.partial or (pending and operand.form.layout.partial)
    copy = operand.other
    if copy is not None and (copy is form or (move is not None and not stays)):
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


def _move(form: Form, layout: Layout, engine: Engine) -> Redistribution | None:
    """Plans the redistribution of an operand.

    Where weights of any size are held until the step ends, an all-gathered one serves its
    transpose in the backward pass too. Elsewhere it is all-gathered again.
    """
    held = form.weight and engine.unsharded.holds_steps
    return (Redistribution.of_weight if held else Redistribution.to)(form, layout, engine)
