"""The plan of an operator for operands of certain forms: redistribute, compute, wrap."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from shardcore.adapters.engine import fallback, redistributed
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.plans.task import Compute, Order, Task, in_order
from shardcore.adapters.engine.redistributed import Redistributed
from shardcore.adapters.engine.redistribution import Redistribution
from shardcore.adapters.engine.tensor import Form, ShardedTensor
from shardcore.adapters.engine.writes import note_view
from shardcore.adapters.torch_private import Kwargs, is_view, tree_leaves
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import Sharding, choose
from shardcore.domain.layouts.derived_layouts import with_pending
from shardcore.domain.layouts.layout import PartialAxes
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
        task = self.task
        moves_weights = task.of_weights and all(operand.form.weight for operand in task.operands)
        self._falls_back = self.sharding.gathers and not moves_weights

    def run(
        self,
        tensors: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Kwargs | None = None,
        known: Sequence[Redistributed | None] = (),
    ) -> list[Any]:
        """Returns the results of a call with `tensors`, whose forms are those of the plan.

        `known` has the redistributed copy of each tensor of the call, if there is one.
        """
        if self._falls_back:
            fallback.warn_fallback(self.operator, [tensors[number] for number in self._numbers])
        if self._stays:
            parts = [tensors[number].part for number in self._numbers]
        else:
            parts = []
            for number, move, uses_copy in self.uses:
                copy = known[number] if uses_copy else None
                tensor = copy.tensor if copy else tensors[number]
                parts.append(
                    tensor.part
                    if move is None
                    else redistribute_operand(tensor, move, self.sharding.replicates)
                )
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
        """Runs the operator itself, with `parts` in the place of tensors."""
        if self._positions is None:
            self._positions = _tensor_positions(args, kwargs)
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
        redistributed.note_copy(view, same, known.serves)

    def _first_results(self, outputs: Sequence[Any]) -> tuple[_Result | None, ...]:
        strides = self._strides_of_views() if self._is_view else None
        ruled = len(self.task.rule.results)
        return tuple(
            None
            if part is None or number >= ruled or self._is_unused(number, part)
            else self._result(number, part, strides)
            for number, part in enumerate(outputs)
        )

    def _is_unused(self, number: int, part: torch.Tensor) -> bool:
        """Returns whether `part` is empty and has other dims than result `number` of the rule.

        So a device returns a tensor that it does not use: CUDA the buffer of `log_sigmoid`.
        """
        return part.shape == (0,) and len(self.task.rule.results[number].dims) != 1

    def _result(
        self, number: int, part: torch.Tensor, strides: Sequence[tuple[int, ...]] | None
    ) -> _Result:
        task, layout = self.task, self.sharding.results[number]
        shape = self.sharding.global_shape(task.rule.results[number], tuple(part.shape))
        if self.pending:
            layout = with_pending(layout, self.pending)
        weight = task.of_weights and all(operand.form.weight for operand in task.operands)
        form_of = partial(self.engine.form, shape, layout, part.dtype, part.device, weight=weight)
        if strides is not None:
            return _Result(form_of(strides=strides[number]), None, shares=self._stays)
        order = task.orders[number] if number < len(task.orders) else None
        in_order = None if order is None else strides_in(order, shape)
        return _Result(form_of(strides=in_order), order, shares=False)

    def _strides_of_views(self) -> Sequence[tuple[int, ...]] | None:
        """Returns the strides of the views of the full tensor; None if the results are copies."""
        form, compute = self.task.operands[0].form, self.task.compute
        assert compute is not None, "a view takes other numbers for a local shard"
        if self.operator in _RESHAPES and not form.is_contiguous and not form.repeats:
            return None
        full = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
        return [tuple(view.stride()) for view in compute([full]) if view is not None]


def _tensor_positions(args: tuple[object, ...], kwargs: Kwargs | None) -> tuple[int, ...]:
    """Returns the positions of tensors in `args`; none if lists or `kwargs` have tensors too.

    They are those of all calls of a plan: its key has the kinds of the arguments.
    """
    nested = [arg for arg in args if isinstance(arg, list | tuple)]
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((nested, kwargs))):
        return ()
    return tuple(n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor))


def with_tensors(argument: object, others: Iterator[object]) -> Any:
    """Returns an argument of an operator with `others` in the place of its tensors."""
    if isinstance(argument, torch.Tensor):
        return next(others)
    if isinstance(argument, list | tuple):
        return [with_tensors(nested, others) for nested in argument]
    return argument


def redistribute_operand(
    tensor: ShardedTensor, move: Redistribution, serves: bool = False
) -> torch.Tensor:
    """Returns the local shard of `tensor` after `move`; a weight may come from the cache.

    `serves` says whether products read the redistributed copy from now on.
    """
    engine: Engine = tensor.engine
    part: torch.Tensor = tensor.part
    if tensor.form.weight:
        return engine.unsharded.get(tensor.memory, part, move, engine)
    shard = move.run(part, engine)
    # A move that ignores pending reductions leaves them to the result.
    if move.form is tensor.form and not move.target.partial:
        same = engine.wrap(shard, engine.evolved(tensor.form, layout=move.target))
        redistributed.note_copy(tensor, same, serves)
    return shard


def _one_of(compute: Compute, number: int, tensor: torch.Tensor) -> torch.Tensor:
    view: torch.Tensor = compute([tensor])[number]
    return view
