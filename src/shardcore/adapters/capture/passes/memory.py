"""Saves copies: an output is written into the memory of the donated input that it replaces.

The cache of `generate()` is such an input. Each layer selects its part of the cache and replaces
one token in it, and the parts are stacked again: `stack([where(mask, new, cache[:, 0]), ...])`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import is_view, last_uses, makers_of, rewrite_calls
from shardcore.adapters.capture.trace import Call, Form, Number, Trace, Value, values
from shardcore.domain.errors import ControlFlow

_SELECT = torch.ops.aten.select.int
_STACK = torch.ops.aten.stack.default
_WHERE = torch.ops.aten.where.self
_WHERE_OUT = torch.ops.aten.where.self_out
# Views whose result depends on the strides of the base.
_OF_STRIDES = {torch.ops.aten.as_strided.default, torch.ops.aten.reshape.default}

# A part of an input: the dims and indices of the selections that lead to it.
_Part = tuple[tuple[int, int], ...]


class _NotDonated(ControlFlow):
    """An output cannot be written into the memory of the input that it replaces."""


def with_donated_inputs(trace: Trace) -> Trace:
    """Overwrites donated inputs by the outputs that replace them.

    Such an output consists of the parts of the input, each with new values where a mask is true.
    After the pass it is the input. An input whose old values are read later stays as it is.
    """
    for index in range(trace.donated):
        with suppress(_NotDonated):
            trace = _overwrite_input(trace, index)
    return trace


def _overwrite_input(trace: Trace, index: int) -> Trace:
    update = _Update(trace, trace.inputs[index])
    outputs = list(values(trace.outputs))
    output = outputs.pop(index)
    if trace.form(output) != trace.form(update.input):
        raise _NotDonated
    update.match(output, ())
    update.check(outputs)
    return update.apply()


@attrs.define(eq=False)
class _Update:
    """The calls that replace an input.

    Args:
        trace: The step.
        input: The input.
        parts: By value in the memory of the input, the part that it is, or that it is a view of.
        written: By result of a `where`, the part whose values it replaces.
        joined: By result of a `stack`, the part of which it has the new values.
    """

    trace: Trace
    input: Value
    parts: dict[Value, _Part] = attrs.field(factory=dict, init=False)
    written: dict[Value, _Part] = attrs.field(factory=dict, init=False)
    joined: dict[Value, _Part] = attrs.field(factory=dict, init=False)
    _whole: dict[_Part, Value] = attrs.field(factory=dict, init=False)  # the first of each part
    _makers: Mapping[Value, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._makers = makers_of(self.trace)
        self.parts[self.input], self._whole[()] = (), self.input
        for call in self.trace.calls:
            if not is_view(call, self.trace) or call.operands[0] not in self.parts:
                continue
            base = call.operands[0]
            part = self.parts[base]
            if call.operator is _SELECT and self._whole.get(part) is base:
                part = (*part, self._selection(call))
                self._whole.setdefault(part, call.result)
            self.parts |= dict.fromkeys(call.results, part)

    def _selection(self, call: Call) -> tuple[int, int]:
        form = self.trace.form(call.args[0])
        dim = call.args[1] % len(form.shape)
        return dim, call.args[2] % form.shape[dim]

    def match(self, value: Value, part: _Part) -> None:
        """Notes the calls that make `value` from this part of the input.

        Raises:
            _NotDonated: If it is not this part with new values.
        """
        call = self.trace.calls[self._makers[value]] if value in self._makers else None
        whole = self._whole.get(part)
        if call is None or whole is None or value in self.written or value in self.joined:
            raise _NotDonated
        if call.operator is _STACK:
            dim = (call.args[1] if len(call.args) > 1 else 0) % len(self.trace.form(value).shape)
            for index, stacked in enumerate(call.args[0]):
                self.match(stacked, (*part, (dim, index)))
            self.joined[value] = part
        elif call.operator is _WHERE and call.args[2] is whole:
            self.written[value] = part
        else:
            raise _NotDonated

    def check(self, outputs: Sequence[Value]) -> None:
        """Checks that no call and none of the other `outputs` needs the old values later.

        Raises:
            _NotDonated: If one does.
        """
        trace, memory = self.trace, self.trace.memory[self.input.number]
        made = trace.memories((*self.written, *self.joined))
        others = [value for value in trace.inputs if value is not self.input]
        if ({memory} | made) & (trace.overwritten() | trace.memories((*outputs, *others))):
            raise _NotDonated
        indices = {self._makers[value]: part for value, part in self.written.items()}
        for index, call in enumerate(trace.calls):
            if is_view(call, trace):
                continue
            old = {self.parts.get(value, ()) for value in call.operands if self._is_old(value)}
            if index in indices:
                # Its mask and its new values are read while it writes.
                if any(self._is_old(value) for value in values(call.args[:2])):
                    raise _NotDonated
                continue
            earlier = [part for at, part in indices.items() if at < index]
            if any(_may_overlap(part, other) for part in old for other in earlier):
                raise _NotDonated

    def _is_old(self, value: Value) -> bool:
        return self.trace.memory[value.number] == self.trace.memory[self.input.number]

    def apply(self) -> Trace:
        """Replaces the calls: they write into the input.

        Raises:
            _NotDonated: If a call cannot read the strides of the input.
        """
        strided: set[Value] = set()  # values whose strides may differ from the recorded ones
        calls = [call for call in self.trace.calls if is_view(call, self.trace)]
        views = {value for call in calls for value in call.results}

        def rewrite(call: Call, new_trace: Trace) -> Call | Value:
            if isinstance(call.result, Value) and call.result in self.joined:
                strided.add(made := self._whole[self.joined[call.result]])
                return made
            if isinstance(call.result, Value) and call.result in self.written:
                strided.add(made := self._whole[self.written[call.result]])
                kwargs = call.kwargs | {"out": made}
                return attrs.evolve(
                    call, operator=_WHERE_OUT, kwargs=kwargs, result=made, writes=(made,)
                )
            if strided.intersection(call.operands):
                for value, form in _forms(call, new_trace):
                    if value in views:
                        new_trace.forms[value.number] = form
                        strided.add(value)
                    elif new_trace.form(value) != form:
                        raise _NotDonated
            return call

        return rewrite_calls(self.trace, rewrite)


def _may_overlap(part: _Part, other: _Part) -> bool:
    for (dim, index), (other_dim, other_index) in zip(part, other, strict=False):
        if (dim, index) != (other_dim, other_index):
            return dim != other_dim
    return True


def _forms(call: Call, trace: Trace) -> Iterator[tuple[Value, Form]]:
    """Yields the results of `call`, each with its form for the strides of the operands in `trace`.

    Raises:
        _NotDonated: If it cannot read them, or torch cannot say what it makes of them.
    """
    is_operator = hasattr(call.operator, "overloadpacket")
    if not is_operator or call.collective or call.operator in _OF_STRIDES:
        raise _NotDonated

    def meta(leaf: Any) -> Any:
        if not isinstance(leaf, Value | Number):
            return leaf
        form = trace.forms[leaf.number] if isinstance(leaf, Value) else None
        if form is None:  # a generator, or a number that is read from a tensor
            raise _NotDonated
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")

    try:
        made = call.operator(
            *torch_private.tree_map(meta, call.args), **torch_private.tree_map(meta, call.kwargs)
        )
    except RuntimeError as error:
        raise _NotDonated from error
    # Attention on CUDA returns numbers too.
    tensors = [leaf for leaf in torch_private.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    for value, tensor in zip(values(call.result), tensors, strict=True):
        form = trace.form(value)
        yield value, attrs.evolve(form, shape=tuple(tensor.shape), strides=tensor.stride())


def with_operands_reused(trace: Trace) -> Trace:
    """Writes results into the memory of dead operands.

    An all-reduce is done in place, where torch's would copy its operand. On a CPU, so are operators
    that read each element before they write it. Inductor does the same by itself.
    """
    uses, uses_and_sends = last_uses(trace), last_uses(trace, sends=True)

    def rewrite(call: Call, new_trace: Trace) -> Call:
        index = len(new_trace.calls)
        recorded = trace.calls[index]  # with the operands that uses were counted of
        if call.is_all_reduce:
            operand = recorded.args[0]
            if not trace.form(operand).is_dense or uses.get(trace.memory[operand.number]) != index:
                return call
            return _writing(call, torch_private.all_reduce_in_place(), call.args[0], {})
        ended = {
            memory for memory in trace.reads_of(recorded) if uses_and_sends.get(memory) == index
        }
        targets = zip(_overwritable(recorded), _overwritable(call), strict=True)
        target = next((new for old, new in targets if _fits(old, recorded, ended, trace)), None)
        variant = None if target is None else torch_private.writing_into(call.operator)
        if variant is None:
            return call
        return _writing(call, variant[0], target, {variant[1]: target})

    return rewrite_calls(trace, rewrite)


def _writing(call: Call, operator: Any, target: Any, kwargs: dict[str, Any]) -> Call:
    named = call.kwargs | kwargs
    return attrs.evolve(call, operator=operator, kwargs=named, result=target, writes=(target,))


def _overwritable(call: Call) -> tuple[Value, ...]:
    """Lists the operands of which `call` reads no element after it has written there."""
    if call.writes or not isinstance(call.result, Value):
        return ()
    if call.operator in torch_private.SOFTMAX_BACKWARD:
        return call.args[:1]  # a row is summed first, then read once more element by element
    is_pointwise = torch.Tag.pointwise in getattr(call.operator, "tags", ())
    draws = is_pointwise and call.draws
    return call.operands if is_pointwise and not draws else ()


def _fits(operand: Value, call: Call, ended: set[int], trace: Trace) -> bool:
    """Checks that the result of `call` fits into `operand`, and that no later call reads that."""
    memory, form = trace.memory[operand.number], trace.form(call.result)
    whole = trace.forms[memory]
    views = {value for value in call.operands if trace.memory[value.number] == memory}
    return (
        memory in ended
        and views == {operand}
        and trace.forms[operand.number] == form
        and form.is_dense
        and form.device.type == "cpu"
        and whole is not None
        and whole.bytes == form.bytes
    )
