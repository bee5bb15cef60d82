"""Persistent buckets: their memory is kept from run to run."""

from collections import Counter
from collections.abc import Mapping
from weakref import WeakValueDictionary

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import makers_of
from shardcore.adapters.capture.passes.cleanup import VIEW
from shardcore.adapters.capture.passes.communication.sums import FLATTEN, SPLIT
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
        """Returns a tensor for each of `forms`, which are those of one program."""
        found = []
        for place, form in enumerate(forms):
            key = form, forms[:place].count(form)
            tensor = self._made.get(key)
            if tensor is None:
                tensor = torch.empty(form.shape, dtype=form.dtype, device=form.device)
                self._made[key] = tensor
            found.append(tensor)
        return found


def with_kept_buckets(tape: Tape, memories: Memories) -> Tape:
    """Returns `tape` with gradients computed in persistent buckets, where they are also reduced.

    A program copies its outputs before the next run writes into a bucket (`RecordedProgram`).
    New memory of many megabytes comes from the operating system page by page, in each run, which
    may take as long as the all-reduce.
    """
    found = tape.with_calls(tape.calls)
    makers = makers_of(tape)
    readers = Counter(value for call in tape.calls for value in call.operands)
    readers.update(values(tape.outputs))
    filled = [call for call in tape.calls if call.operator is FLATTEN]
    tensors = memories.taken([tape.form(call.result) for call in filled])
    found.kept = {call.result.number: tensor for call, tensor in zip(filled, tensors, strict=True)}
    instead: dict[int, Call | None] = {}  # by place, the call that stands there now, if any
    for call, tensor in zip(filled, tensors, strict=True):
        forms = [tape.form(each) for each in call.args[0]]
        parts = torch.split(tensor, [each.elements for each in forms])
        copied = {}
        for operand, part in zip(call.args[0], parts, strict=True):
            made = _made_in(part, operand, makers, readers, found)
            instead |= made
            if not made:
                copied[_window(part, operand, call.result, found)] = operand
        args = list(copied), list(copied.values())
        copy = Call(torch_private.LIST_COPY, args, {}, None, tuple(copied), call.line)
        instead[makers[call.result]] = copy if copied else None
    kept = ((place, call) for place, call in enumerate(found.calls) if not _is_part(call, found))
    replaced = (instead.get(place, call) for place, call in kept)
    return found.with_calls(call for call in replaced if call is not None)


def _is_part(call: Call, tape: Tape) -> bool:
    """Returns whether `call` makes views of a bucket; these are kept with it."""
    if call.operator not in (SPLIT, VIEW) or call.args[0].number not in tape.kept:
        return False
    whole = tape.kept[call.args[0].number]
    if call.operator is SPLIT:
        parts = torch.split(whole, call.args[1])
        tape.kept.update((v.number, part) for v, part in zip(call.result, parts, strict=True))
    else:
        tape.kept[call.result.number] = whole.view(call.args[1])
    return True


def _made_in(
    part: torch.Tensor,
    value: Value,
    makers: Mapping[Value, int],
    readers: Counter[Value],
    tape: Tape,
) -> dict[int, Call | None]:
    """Returns, by place, the calls that compute `value`, or its base, in `part`.

    None stands for a view that is not needed then. There are no calls if it cannot be made there.
    """
    instead: dict[int, Call | None] = {}
    while value in makers and readers[value] == 1:
        place = makers[value]
        call = tape.calls[place]
        if call.operator in _INTO and tape.form(value).is_dense:
            window = _window(part, value, value, tape)
            kwargs = {**call.kwargs, "out": window}
            into = _INTO[call.operator]
            made = attrs.evolve(call, operator=into, kwargs=kwargs, result=window, writes=(window,))
            return {**instead, place: made}
        if call.operator not in _VIEWS:
            break
        instead[place] = None
        value = call.args[0]
    return {}


def _window(part: torch.Tensor, like: Value, owner: Value, tape: Tape) -> Value:
    """Returns `part` of a bucket as a kept value: in form as `like`, in memory as `owner`."""
    window = tape.new(tape.form(like), tape.memory[owner.number])
    tape.kept[window.number] = part.view(tape.form(like).shape)
    return window


# Operators with an `out` variant that gives the same values.
_INTO = {
    torch.ops.aten.mm.default: torch.ops.aten.mm.out,
    torch.ops.aten.bmm.default: torch.ops.aten.bmm.out,
}
_VIEWS = (VIEW, torch_private.UNSAFE_VIEW)
