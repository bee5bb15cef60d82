"""Runs an operator as the core plans it: operands redistributed, local shards computed.

What is decided depends on the forms of the operands and on numbers only, so that a plan is made
once and kept for every later call that is alike.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from shardcore.adapters import fallback
from shardcore.adapters.engine import elsewhere
from shardcore.adapters.engine.elsewhere import Elsewhere
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistribute import Redistribution
from shardcore.adapters.engine.tensor import Form, ShardedTensor, contiguous_strides
from shardcore.adapters.engine.view_copies import note_view
from shardcore.adapters.torch_compat import is_view
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.operator_rules import OperatorRule
from shardcore.domain.placements import Replicate
from shardcore.domain.planner import Placed, Shapes, Split, choose

Parts = Sequence[torch.Tensor]
Compute = Callable[[Parts], Sequence[torch.Tensor | None]]
Order = tuple[int, ...]


@attrs.frozen(eq=False)
class Operand:
    """A tensor among the arguments of an operator, without its values.

    Args:
        form: Its form.
        number: Its number among all tensors of the call.
        other: The form that it has elsewhere, if an operator has brought it there.
        serves: Whether products read it there.
    """

    form: Form
    number: int
    other: Form | None = None
    serves: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.form.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.form.dtype

    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return int(torch.Size(self.form.shape).numel())


def operand(operator: Any, form: Form, number: int, known: Elsewhere | None) -> Operand:
    """An operand of `operator`. A pending one that was reduced is that, but for its views."""
    if known is None:
        return Operand(form, number)
    other = known.tensor.form
    if form.is_pending and not is_view(operator):
        return Operand(other, number, other)
    return Operand(form, number, other, known.serves)


@attrs.frozen(eq=False)
class Task:
    """An operator to be split by a rule.

    Args:
        rule: Its sharding rule.
        operands: Its tensors, as many as the rule has.
        compute: Runs it on local shards, in the order of `operands`; gives those of the results,
            None for a result that is not asked for. None runs the operator itself on its own
            arguments, with the local shards in the place of tensors.
        result_shapes: The global shapes of the results, where sums may be left pending.
        linear_in: The operands, by place, each of which it is linear in: where that one alone is a
            pending sum, the results are.
        adds: The operands, by place, that it adds up, or chooses from: where one of them is a
            pending sum, the results are, and the first rank adds those that are none.
        of_weights: Whether results of weights alone are weights.
        scales: Whether it multiplies element by element.
        orders: Per result the order of its dims in memory, outermost first; None, or nothing, for
            a result whose last dim is innermost.
        layouts: The layouts of operands and results, where the rule is not to be asked.
    """

    rule: OperatorRule
    operands: Sequence[Operand]
    compute: Compute | None = None
    result_shapes: Shapes = ()
    linear_in: Sequence[int] = ()
    adds: Sequence[int] = ()
    of_weights: bool = False
    scales: bool = False
    orders: Sequence[Order | None] = ()
    layouts: Split | None = None


@attrs.define(eq=False)
class _Result:
    """A result: its form, and how it is made of what the operator gives.

    Args:
        form: Its form.
        order: The dims of its local shard, outermost in memory first; None for their own order.
        shares: Whether the local shard shares the memory of that of the operand.
    """

    form: Form
    order: Order | None
    shares: bool


@attrs.define(eq=False)
class Plan:
    """How an operator runs on operands of certain forms.

    Args:
        operator: The operator.
        engine: Runs it.
        task: What was asked of the planner.
        numbers: Of each operand of the task, its number among the tensors of the call.
        moves: Per operand of the task, how it is brought to where it is wanted; None if it is.
        split: The layouts of operands and results.
        pending: The reductions of the operand that stay pending.
        elsewhere: Per operand, whether it is taken from where an operator has brought it.
    """

    operator: Any
    engine: Engine
    task: Task
    numbers: tuple[int, ...]
    moves: tuple[Redistribution | None, ...]
    split: Split
    pending: PartialAxes
    elsewhere: tuple[bool, ...]
    _stays: bool = attrs.field(init=False)
    _is_view: bool = attrs.field(init=False)
    _falls_back: bool = attrs.field(init=False)
    _results: tuple[_Result | None, ...] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._stays = not any(self.moves) and not any(self.elsewhere)
        self._is_view = is_view(self.operator)
        # A weight that is only moved, and all-gathered for that, has no work that ranks repeat.
        moves_weights = self.task.of_weights and all(
            each.form.weight for each in self.task.operands
        )
        self._falls_back = self.split.gathers and not moves_weights

    def run(
        self,
        tensors: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        known: Sequence[Elsewhere | None] = (),
    ) -> list[Any]:
        """The results.

        Args:
            tensors: All tensors of the call, in order, of the forms that the plan was made for.
            args: The arguments of the call.
            kwargs: The named ones.
            known: Where each tensor of the call is too, if it is anywhere.
        """
        if self._falls_back:
            fallback.tell(self.operator, [tensors[number] for number in self.numbers])
        if self._stays:
            parts = [tensors[number].part for number in self.numbers]
        else:
            parts = [
                tensor.part if move is None else moved(tensor, move, self.split.replicates)
                for tensor, move in zip(self._operands(tensors, known), self.moves, strict=True)
            ]
        compute = self.task.compute
        found = compute(parts) if compute else self._call(parts, args, kwargs)
        if self._results is None:
            self._results = self._first_results(found)
        if self._is_view:
            number = self.numbers[0]
            return self._views(found, tensors[number], known[number] if known else None)
        wrap = self.engine.wrap
        return [
            None
            if part is None or result is None
            else wrap(_in_order(part, result.order), result.form)
            for part, result in zip(found, self._results, strict=True)
        ]

    def _call(self, parts: list[torch.Tensor], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run the operator itself, with `parts` in the place of tensors."""
        left = iter(parts)
        local_args = [_with_parts(each, left) for each in args]
        if kwargs:
            named = {name: _with_parts(each, left) for name, each in kwargs.items()}
            found = self.operator(*local_args, **named)
        else:
            found = self.operator(*local_args)
        return found if isinstance(found, tuple | list) else (found,)

    def _operands(self, tensors: Sequence[Any], known: Sequence[Elsewhere | None]) -> list[Any]:
        """The operands of the task, some of them from elsewhere."""
        found = []
        for number, is_elsewhere in zip(self.numbers, self.elsewhere, strict=True):
            other = known[number] if is_elsewhere else None
            found.append(other.tensor if other else tensors[number])
        return found

    def _views(self, found: Sequence[Any], operand: Any, known: Elsewhere | None) -> list[Any]:
        assert self._results is not None
        results = []
        for number, (part, result) in enumerate(zip(found, self._results, strict=True)):
            assert result is not None
            made = part if result.shares else _in_order(part, result.order)
            tensor = self.engine.wrap(made, result.form, operand.memory)
            is_copy = not result.shares or bool(self.pending)
            if is_copy or operand.copied is not None:
                assert self.task.compute is not None
                take = partial(_one_of, self.task.compute, number)
                note_view(tensor, operand, take, is_copy=is_copy)
            # What had to be moved could not be split as it was, nor as it is elsewhere.
            if known and self._stays and elsewhere.splits_less(operand, known.tensor):
                self._view_elsewhere(tensor, number, operand, known)
            results.append(tensor)
        return results

    def _view_elsewhere(self, view: Any, number: int, operand: Any, known: Elsewhere) -> None:
        """Note where `view`, result `number`, is too: the same view of `operand` elsewhere."""
        assert self.task.compute is not None
        other = known.tensor
        part = self.task.compute([other.part])[number]
        assert part is not None
        own, there = operand.form.layout, other.form.layout
        moved = (a for a in own.mesh.axis_names if own.placement(a) != there.placement(a))
        layout = view.form.layout.without(*moved)
        same = self.engine.wrap(part, self.engine.evolved(view.form, layout=layout), other.memory)
        elsewhere.note(view, same, known.serves)

    def _first_results(self, found: Sequence[Any]) -> tuple[_Result | None, ...]:
        strides = self._strides_of_views() if self._is_view else None
        return tuple(
            None if part is None else self._result(number, part, strides)
            for number, part in enumerate(found)
        )

    def _result(
        self, number: int, part: torch.Tensor, strides: Sequence[tuple[int, ...]] | None
    ) -> _Result:
        task, layout = self.task, self.split.results[number]
        shape = self.split.global_shape(task.rule.results[number], tuple(part.shape))
        if self.pending:
            layout = _with(layout, self.pending)
        weight = task.of_weights and all(each.form.weight for each in task.operands)
        form_of = partial(self.engine.form, shape, layout, part.dtype, part.device, weight=weight)
        if strides is not None:
            return _Result(form_of(strides=strides[number]), None, shares=self._stays)
        order = task.orders[number] if number < len(task.orders) else None
        in_order = None if order is None else _strides_in(order, shape)
        return _Result(form_of(strides=in_order), order, shares=False)

    def _strides_of_views(self) -> Sequence[tuple[int, ...]] | None:
        """The strides of the views of the full tensor; None where the results are copies."""
        form, compute = self.task.operands[0].form, self.task.compute
        assert compute is not None, "a view has numbers of its own for a local shard"
        if self.operator in _RESHAPES and not form.is_contiguous:
            return None
        full = torch.empty_strided(form.shape, form.strides, device="meta")
        return [tuple(each.stride()) for each in compute([full]) if each is not None]


def _with_parts(argument: Any, parts: Iterator[torch.Tensor]) -> Any:
    if isinstance(argument, torch.Tensor):
        return next(parts)
    if isinstance(argument, list | tuple):
        return [_with_parts(each, parts) for each in argument]
    return argument


def moved(tensor: Any, move: Redistribution, serves: bool = False) -> torch.Tensor:
    """The local shard of `tensor` where `move` brings it; a weight's may still be there.

    Args:
        tensor: A sharded tensor.
        move: How it is brought there.
        serves: Whether products are to read it there from now on.
    """
    engine: Engine = tensor.engine
    part: torch.Tensor = tensor.part
    if tensor.form.weight:
        return engine.unsharded.get(tensor.memory, part, move, engine)
    found = move.run(part, engine)
    # A move that is planned as if nothing were pending leaves the sum to the result.
    if move.form is tensor.form and not move.target.partial:
        same = engine.wrap(found, engine.evolved(tensor.form, layout=move.target))
        elsewhere.note(tensor, same, serves)
    return found


# They copy what has gaps, or another order, in memory.
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten.reshape.default}


def _one_of(compute: Compute, number: int, tensor: torch.Tensor) -> torch.Tensor:
    found = compute([tensor])[number]
    assert found is not None
    return found


def order_of(operand: Operand) -> Order | None:
    """The dims of `operand`, outermost in memory first; None for their own order, or with gaps.

    An operator on images gives its result in the order of its operand, as torch does.
    """
    form = operand.form
    if form.ndim < 3 or form.is_contiguous:
        return None
    order = tuple(sorted(range(form.ndim), key=lambda dim: (-form.strides[dim], dim)))
    return order if _strides_in(order, form.shape) == form.strides else None


def _strides_in(order: Order, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims lie in memory in `order`."""
    in_memory = contiguous_strides(tuple(shape[dim] for dim in order))
    by_dim = dict(zip(order, in_memory, strict=True))
    return tuple(by_dim[dim] for dim in range(len(shape)))


def _in_order(part: torch.Tensor, order: Order | None) -> torch.Tensor:
    """`part` without gaps, its dims in memory in `order`."""
    if order is None:
        return part.contiguous()
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return part.permute(order).contiguous().permute(inverse)


def planned(operator: Any, task: Task, engine: Engine) -> Plan:
    """The plan of an operator by its rule, with the cheapest split of the core's planner."""
    forms = _forms(task)
    pending = _kept_pending(task, forms)
    given = [
        engine.evolved(form, layout=form.layout.reduced) if pending else form for form in forms
    ]
    split = _split(task, given, engine)
    if pending and any(_uses(each, pending) for each in (*split.operands, *split.results)):
        pending, given = (), forms
        split = _split(task, forms, engine)
    targets = [
        _with(layout, pending) if pending and place in task.adds else layout
        for place, layout in enumerate(split.operands)
    ]
    # What is pending already stays as it is; only what is not becomes zeros on other ranks.
    sources = [
        engine.evolved(form, layout=_with(form.layout, pending))
        if pending and place in task.adds and forms[place].layout.partial
        else form
        for place, form in enumerate(given)
    ]
    numbers, moves, elsewheres = [], [], []
    for each, form, source, target in zip(task.operands, forms, sources, targets, strict=True):
        move = _move(source, target, engine)
        other = each.other
        # What stays pending is not read where its sum is.
        stays = target.partial or (pending and each.form.layout.partial)
        is_elsewhere = other is form or not (other is None or move is None or stays)
        if is_elsewhere and other is not None:
            move = _move(other, target, engine)
        numbers.append(each.number)
        moves.append(move)
        elsewheres.append(is_elsewhere)
    return Plan(
        operator, engine, task, tuple(numbers), tuple(moves), split, pending, tuple(elsewheres)
    )


def _forms(task: Task) -> list[Form]:
    """The forms of the operands: a product reads some of them elsewhere."""
    sums = any(task.rule.sums(result) for result in task.rule.results)
    is_product = sums and len(task.operands) > 1
    return [
        each.other if is_product and each.serves and each.other else each.form
        for each in task.operands
    ]


def _move(form: Form, layout: Layout, engine: Engine) -> Redistribution | None:
    """How a tensor moves. A weight that is held for the step is the same weight transposed.

    Else the backward pass gathers it again: it is not held from the forward pass on.
    """
    held = form.weight and engine.unsharded.holds_steps
    return (Redistribution.of_weight if held else Redistribution.to)(form, layout, engine)


def _kept_pending(task: Task, forms: Sequence[Form]) -> PartialAxes:
    """The reductions of operands that stay pending in the results."""
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
    # The first rank adds what is not pending: to a sum, and not to a mean.
    only_sums = {op for _, op in pending} == {"sum"}
    return pending if only_sums or len(places) == len(task.adds) else ()


def _uses(layout: Layout, pending: PartialAxes) -> bool:
    """Whether an axis of `pending` does something to a tensor of `layout` already."""
    return any(not isinstance(layout.placement(axis), Replicate) for axis, _ in pending)


def _with(layout: Layout, pending: PartialAxes) -> Layout:
    return Layout(layout.mesh, layout.spec, (*layout.partial, *pending), layout.blocks)


def _split(task: Task, forms: Sequence[Form], engine: Engine) -> Split:
    if task.layouts is not None:
        return task.layouts
    if engine.gathers and not all(form.weight or not form.ndim for form in forms):
        forms = [_gathered(form, engine) if form.weight else form for form in forms]
    placed = tuple(
        Placed(
            form.shape,
            form.layout,
            form.dtype.itemsize,
            form.weight,
            None if operand.other is None else operand.other.layout,
        )
        for form, operand in zip(forms, task.operands, strict=True)
    )
    return choose(task.rule, placed, task.result_shapes, task.scales, engine.costs)


def run_rule(
    operator: Any,
    rule: OperatorRule,
    tensors: Sequence[torch.Tensor],
    compute: Compute,
    result_shapes: Shapes = (),
) -> list[Any]:
    """Run `compute` on the local shards of `tensors`, split by `rule`; see `Task`."""
    engine: Engine = next(each.engine for each in tensors if isinstance(each, ShardedTensor))
    sharded = [engine.as_sharded(each) for each in tensors]
    operands = [Operand(each.form, number) for number, each in enumerate(sharded)]
    return planned(operator, Task(rule, operands, compute, result_shapes), engine).run(sharded)


def _gathered(form: Form, engine: Engine) -> Form:
    return engine.evolved(form, layout=Layout.replicated(engine.world.mesh, form.ndim))
