"""Drops calls that compute again what an earlier call has computed."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.analyses import is_view, last_uses, rename_call, rename_values
from shardcore.adapters.capture.passes.cleanup import without_dead_code
from shardcore.adapters.capture.passes.constants import SMALL_BYTES
from shardcore.adapters.capture.trace import Call, Literals, Trace, Value, numbered, values


def without_repeated_calls(trace: Trace, literals: Literals) -> Trace:
    """Drops calls that repeat an earlier one on equal operands.

    Each layer of a decoder makes the same mask and the same table of positions. No memory is held
    for longer, except for results of up to `SMALL_BYTES`. What a backward pass repeats of the
    forward pass, it recomputes to save memory: it still does, unless it is held anyway.

    Args:
        trace: A step.
        literals: Its constants.
    """
    repeats = _Repeats(trace, _equal_literals(trace, literals))
    calls = [call for index, call in enumerate(trace.calls) if not repeats.drops(call, index)]
    names = repeats.names
    if not names:
        return trace
    new_trace = trace.with_calls(rename_call(call, names) for call in calls)
    new_trace.outputs = rename_values(trace.outputs, names)
    new_trace.share(names)
    return without_dead_code(new_trace)


def _equal_literals(trace: Trace, literals: Literals) -> dict[Value, Value]:
    """Finds, by constant, an earlier one with the same elements; no run writes into either."""
    overwritten, first, names = trace.overwritten(), dict[Hashable, Value](), {}
    for number, tensor in literals.items():
        value = numbered(number)
        if trace.memory[number] not in overwritten and _is_plain(tensor):
            content = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            earlier = first.setdefault((trace.form(value), content), value)
            if earlier is not value:
                names[value] = earlier
    return names


def _is_plain(tensor: torch.Tensor) -> bool:
    """Finds constants that are small and whose bytes are their elements."""
    is_strided = tensor.layout is torch.strided and not tensor.is_complex()
    return is_strided and tensor.nbytes <= SMALL_BYTES


@attrs.define(eq=False)
class _Repeats:
    """Finds the calls whose results exist already; `drops` is asked for each call, in order.

    Args:
        trace: A step.
        names: By value that is dropped, the earlier one to read instead.
    """

    trace: Trace
    names: dict[Value, Value]
    _equal: dict[Value, Value] = attrs.field(init=False)  # by value, the first one that equals it
    _first: dict[Hashable, Call] = attrs.field(factory=dict, init=False)
    _latest: dict[Hashable, Call] = attrs.field(factory=dict, init=False)  # that is not dropped
    _writes: Counter[int] = attrs.field(factory=Counter, init=False)  # so far, by memory
    _last_uses: dict[int, int] = attrs.field(init=False)
    _changing: set[int] = attrs.field(init=False)  # memory that calls or the caller write into

    def __attrs_post_init__(self) -> None:
        self._equal = dict(self.names)
        self._last_uses = last_uses(self.trace)
        outputs = self.trace.memories(values(self.trace.outputs))
        self._changing = self.trace.overwritten() | outputs

    def drops(self, call: Call, index: int) -> bool:
        """Tells whether the results of the call at `index` are there already, and notes them."""
        self._writes.update(self.trace.memories(call.writes))
        key = self._key(call)
        if key is None:
            return False
        first = self._first.setdefault(key, call)
        if first is not call:
            self._equal |= zip(call.results, first.results, strict=True)
        latest = self._latest.setdefault(key, call)
        if latest is call or not self._is_there(latest, call, index):
            self._latest[key] = call
            return False
        self._read_instead(latest, call)
        return True

    def _key(self, call: Call) -> Hashable | None:
        """Describes what a call computes; None if another such call may give something else."""
        is_pure = call.name.startswith("aten.") and not (call.writes or call.draws)
        if not is_pure or any(self.trace.forms[value.number] is None for value in call.operands):
            return None
        if not set(call.operands).isdisjoint(call.results):  # `to` of a tensor that is so already
            return None
        operands: Any = call.args, call.kwargs
        if not self._equal.keys().isdisjoint(call.operands):
            operands = rename_values(operands, self._equal)
        text = repr(operands)  # it tells 1, 1.0 and True apart, which are equal in Python
        if self._is_view(call):
            return call.operator, text
        made = self.trace.memories(call.results)
        if not made or made & self._changing:
            return None
        read = sorted(self.trace.memories(values(operands)))
        return call.operator, text, tuple((memory, self._writes[memory]) for memory in read)

    def _is_view(self, call: Call) -> bool:
        """Finds the calls that read no memory; another operand would be a number in a tensor."""
        return len(call.operands) == 1 and is_view(call, self.trace)

    def _is_there(self, earlier: Call, call: Call, index: int) -> bool:
        """Tells whether the results of `earlier` are held, or small, when `call` runs."""
        made = self.trace.memories(earlier.results)
        if all(self._last_uses.get(memory, index) >= index for memory in made):
            return True
        size = sum(self.trace.form(value).bytes for value in call.results)
        is_small = size <= SMALL_BYTES and not is_view(call, self.trace)
        return is_small and earlier.backward is call.backward

    def _read_instead(self, earlier: Call, call: Call) -> None:
        for value, other in zip(call.results, earlier.results, strict=True):
            self.names[value] = other
            own, others = self.trace.memory[value.number], self.trace.memory[other.number]
            if own in self._last_uses and others in self._last_uses:
                last = max(self._last_uses[own], self._last_uses[others])
                self._last_uses[others] = last
