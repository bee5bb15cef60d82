"""All-reduces that wait for each other, and are done together."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Form, Tape, Value

# As `DistributedDataParallel` has it: large enough that the start of a collective is no matter.
BUCKET_BYTES = 25 * 1024 * 1024


def in_buckets(tape: Tape, size: int = BUCKET_BYTES) -> Tape:
    """All-reduces of one kind over one group are done in one, until somebody needs a result.

    Args:
        tape: A step.
        size: The bytes of a bucket, after which it is sent.
    """
    found = tape.with_calls([])
    buckets: dict[Any, _Bucket] = {}
    chunks: list[list[Call]] = []
    for call in tape.calls:
        due = [key for key, each in buckets.items() if each.is_touched(call, tape)]
        chunks += [buckets.pop(key).sent(found) for key in due]
        if torch_compat.is_all_reduce(call.operator):
            form = tape.form(call.args[0])
            key = (*call.args[1:], form.dtype, form.device)
            chunks.append([])
            bucket = buckets.setdefault(key, _Bucket(chunks[-1]))
            bucket.add(call, tape)
            if bucket.bytes >= size:
                chunks.append(buckets.pop(key).sent(found))
        elif not any(each.waits(call, tape) for each in buckets.values()):
            chunks.append([call])
    chunks += [bucket.sent(found) for bucket in buckets.values()]
    found.calls = [call for chunk in chunks for call in chunk]
    return found


@attrs.define
class _Bucket:
    """All-reduces that are not started yet.

    Args:
        place: Where the first one stood.
    """

    place: list[Call]
    calls: list[Call] = attrs.field(factory=list)
    bytes: int = 0
    _made: set[int] = attrs.field(factory=set)
    _read: set[int] = attrs.field(factory=set)

    def add(self, call: Call, tape: Tape) -> None:
        self.calls.append(call)
        self.bytes += tape.form(call.args[0]).bytes
        self._made |= tape.writes_of(call)
        self._read |= tape.reads_of(call)

    def waits(self, call: Call, tape: Tape) -> bool:
        """Whether `call` waits for one of them, which all of them are later."""
        return torch_compat.is_wait(call.operator) and bool(tape.reads_of(call) & self._made)

    def is_touched(self, call: Call, tape: Tape) -> bool:
        """Whether `call` needs a result, or writes into what is to be sent."""
        if self.waits(call, tape):
            return False
        touched = tape.reads_of(call) | tape.writes_of(call)
        return bool(touched & self._made or tape.writes_of(call) & self._read)

    def sent(self, tape: Tape) -> list[Call]:
        """What does them, to stand where a result is needed; one alone starts where it stood."""
        if len(self.calls) > 1:
            return _together(self.calls, tape)
        (only,) = self.calls
        self.place.append(only)
        return [Call(torch_compat.wait_for(), (only.result,), {}, only.result)]


def _together(bucket: list[Call], tape: Tape) -> list[Call]:
    """The calls that do those of `bucket` in one collective."""
    first = bucket[0]
    form = tape.form(first.args[0])
    forms = [tape.form(call.args[0]) for call in bucket]
    flat = [tape.new(Form((each.elements,), form.dtype, form.device)) for each in forms]
    whole = Form((sum(each.elements for each in forms),), form.dtype, form.device)
    sent, reduced = tape.new(whole), tape.new(whole)
    views = [Call(_RESHAPE, (c.args[0], [-1]), {}, f) for c, f in zip(bucket, flat, strict=True)]
    parts = [tape.new(tape.form(each), reduced.number) for each in flat]
    return [
        *views,
        Call(torch.ops.aten.cat.default, (flat,), {}, sent),
        attrs.evolve(first, args=(sent, *first.args[1:]), result=reduced),
        Call(torch_compat.wait_for(), (reduced,), {}, reduced),
        Call(_SPLIT, (reduced, [each.elements for each in forms]), {}, parts),
        *(
            _shaped(part, each, call.result, reduced, tape)
            for part, each, call in zip(parts, forms, bucket, strict=True)
        ),
    ]


def _shaped(part: Value, form: Form, result: Value, reduced: Value, tape: Tape) -> Call:
    """`result` as a view of what the bucket made: its memory is that of the bucket."""
    before = tape.memory[result.number]
    for number, memory in enumerate(tape.memory):
        if memory == before:
            tape.memory[number] = reduced.number
    return Call(torch.ops.aten.view.default, (part, list(form.shape)), {}, result)


_RESHAPE = torch.ops.aten.reshape.default
_SPLIT = torch.ops.aten.split_with_sizes.default
