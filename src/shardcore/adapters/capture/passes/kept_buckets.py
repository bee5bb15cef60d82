"""Buckets that are there once for all runs, and are filled anew in each."""

from collections import Counter
from weakref import WeakValueDictionary

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.buckets import FLATTEN, SPLIT, VIEW
from shardcore.adapters.capture.tape import Call, Form, Tape, Value, values


class Memories:
    """Tensors into which a program writes before it reads them.

    Programs run in turns: they share them. When the last that has one is gone, so is the tensor.
    """

    def __init__(self) -> None:
        self._made: WeakValueDictionary[tuple[Form, int], torch.Tensor] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def taken(self, forms: list[Form]) -> list[torch.Tensor]:
        """A tensor for each of `forms`, which are those of one program."""
        taken: dict[Form, int] = {}
        return [self._next(form, taken) for form in forms]

    def _next(self, form: Form, taken: dict[Form, int]) -> torch.Tensor:
        place = taken.get(form, 0)
        taken[form] = place + 1
        found = self._made.get((form, place))
        if found is None:
            found = torch.empty(form.shape, dtype=form.dtype, device=form.device)
            self._made[form, place] = found
        return found


def with_kept_buckets(tape: Tape, memories: Memories) -> Tape:
    """What is sent is made in memory that is there already, where the results are then found.

    A program copies its outputs before the next run writes into a bucket (`RecordedProgram`).
    New memory of many megabytes comes from the operating system page by page, in each run, which
    may take as long as sending it does.

    Args:
        tape: A step whose all-reduces are in buckets.
        memories: Where the memory comes from.
    """
    filled = [call for call in tape.calls if call.operator is FLATTEN]
    buckets = [call.result for call in filled]
    tensors = memories.taken([tape.form(each) for each in buckets])
    found = tape.with_calls(tape.calls)
    found.kept = {each.number: tensor for each, tensor in zip(buckets, tensors, strict=True)}
    makers = _Makers.of(found)
    for call in filled:
        makers.fill(call, found)
    found.calls = [
        makers.calls.get(place, call)
        for place, call in enumerate(found.calls)
        if not _is_part(call, found) and place not in makers.needless
    ]
    return found


def _is_part(call: Call, tape: Tape) -> bool:
    """Whether `call` gives views of a bucket, which are kept with it from now on."""
    if call.operator not in (SPLIT, VIEW) or call.args[0].number not in tape.kept:
        return False
    whole = tape.kept[call.args[0].number]
    if call.operator is SPLIT:
        parts = torch.split(whole, call.args[1])
        tape.kept.update((v.number, part) for v, part in zip(call.result, parts, strict=True))
    else:
        tape.kept[call.result.number] = whole.view(call.args[1])
    return True


@attrs.frozen
class _Makers:
    """The calls that make what is sent.

    Args:
        places: By value, the place of the call that makes it.
        readers: By value, how often it is read, by one call or by several, or returned.
        calls: By place, what stands there instead.
        needless: The places of calls that are not needed any more.
    """

    places: dict[Value, int]
    readers: Counter[Value]
    calls: dict[int, Call] = attrs.field(factory=dict)
    needless: set[int] = attrs.field(factory=set)

    @classmethod
    def of(cls, tape: Tape) -> "_Makers":
        readers = Counter(value for call in tape.calls for value in call.operands)
        readers.update(values(tape.outputs))
        places: dict[Value, int] = {}
        for place, call in enumerate(tape.calls):
            if isinstance(call.result, Value):
                places.setdefault(call.result, place)
        return cls(places, readers)

    def fill(self, call: Call, tape: Tape) -> None:
        """What `call` would put into a bucket is made there; what cannot be is copied."""
        operands = call.args[0]
        forms = [tape.form(each) for each in operands]
        parts = torch.split(tape.kept[call.result.number], [each.elements for each in forms])
        copied = {}
        for operand, part, form in zip(operands, parts, forms, strict=True):
            if not self._make(operand, part, tape):
                window = tape.new(form, tape.memory[call.result.number])
                tape.kept[window.number] = part.view(form.shape)
                copied[window] = operand
        place = self.places[call.result]
        if copied:
            windows = list(copied)
            args = windows, list(copied.values())
            self.calls[place] = Call(_COPY, args, {}, None, tuple(windows), call.line)
        else:
            self.needless.add(place)

    def _make(self, value: Value, part: torch.Tensor, tape: Tape) -> bool:
        """Have the one who makes `value`, or what it is a view of, make it in `part`."""
        views = []
        while True:
            place = self.places.get(value)
            if place is None or self.readers[value] != 1:
                return False
            call = tape.calls[place]
            if call.operator not in _VIEWS:
                break
            views.append(place)
            value = call.args[0]
        if call.operator not in _INTO or not tape.form(value).is_dense:
            return False
        window = tape.new(tape.form(value), tape.memory[value.number])
        tape.kept[window.number] = part.view(tape.form(value).shape)
        kwargs = {**call.kwargs, "out": window}
        into = _INTO[call.operator]
        self.calls[place] = attrs.evolve(
            call, operator=into, kwargs=kwargs, result=window, writes=(window,)
        )
        self.needless.update(views)
        return True


# Operators that torch can also have write where they are told, with the same values.
_INTO = {
    torch.ops.aten.mm.default: torch.ops.aten.mm.out,
    torch.ops.aten.bmm.default: torch.ops.aten.bmm.out,
}
_VIEWS = (VIEW, torch_compat.UNSAFE_VIEW)
_COPY = torch_compat.LIST_COPY
