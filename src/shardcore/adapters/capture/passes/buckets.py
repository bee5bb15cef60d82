"""All-reduces that wait for each other, and are done together."""

import math
from collections import Counter
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Form, Tape, Value

# As `DistributedDataParallel` has it: large enough that the start of a collective is no matter.
BUCKET_BYTES = 25 * 1024 * 1024
# Fewer bytes go in one bucket: they are sent in less time than it takes to begin.
SMALL_BYTES = 1024 * 1024

FLATTEN = torch.ops.aten.flatten_dense_tensors.default
SPLIT = torch.ops.aten.split_with_sizes.default
VIEW = torch.ops.aten.view.default


def in_buckets(tape: Tape, most: int = BUCKET_BYTES, small: int = SMALL_BYTES) -> Tape:
    """All-reduces of one kind over one group are done in one, until somebody needs a result.

    Of `n` bytes there are at most `ceil(n / most) + 1` buckets, of about one size: all but the
    last are on their way while the backward pass goes on.

    Args:
        tape: A step.
        most: The bytes of a bucket.
        small: So many bytes, or fewer, go in one.
    """
    found = tape.with_calls([])
    buckets: dict[Any, _Bucket] = {}
    sizes = _sizes(tape, most, small)
    chunks: list[list[Call]] = []
    for call in tape.calls:
        due = [key for key, each in buckets.items() if each.is_touched(call, tape)]
        chunks += [buckets.pop(key).sent(found) for key in due]
        if torch_compat.is_all_reduce(call.operator):
            key = _kind(call, tape)
            chunks.append([])
            bucket = buckets.setdefault(key, _Bucket(chunks[-1]))
            bucket.add(call, tape)
            if bucket.bytes >= sizes[key]:
                chunks.append(buckets.pop(key).sent(found))
        elif not any(each.waits(call, tape) for each in buckets.values()):
            chunks.append([call])
    chunks += [bucket.sent(found) for bucket in buckets.values()]
    found.calls = [call for chunk in chunks for call in chunk]
    return found


def _kind(call: Call, tape: Tape) -> Any:
    """What all-reduces have in common that can be done in one."""
    form = tape.form(call.args[0])
    return (*call.args[1:], form.dtype, form.device)


def _sizes(tape: Tape, most: int, small: int) -> dict[Any, int]:
    """After how many bytes a bucket is sent, for each kind."""
    bytes_of: Counter[Any] = Counter()
    for call in tape.calls:
        if torch_compat.is_all_reduce(call.operator):
            bytes_of[_kind(call, tape)] += tape.form(call.args[0]).bytes
    return {
        kind: most if total <= small else math.ceil(total / (math.ceil(total / most) + 1))
        for kind, total in bytes_of.items()
    }


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
    sent = tape.new(Form((sum(each.elements for each in forms),), form.dtype, form.device))
    parts = [
        tape.new(Form((each.elements,), each.dtype, each.device), sent.number) for each in forms
    ]
    operator = torch_compat.all_reduce_in_place()
    return [
        Call(FLATTEN, ([call.args[0] for call in bucket],), {}, sent),
        attrs.evolve(
            first, operator=operator, args=(sent, *first.args[1:]), result=sent, writes=(sent,)
        ),
        Call(torch_compat.wait_for(), (sent,), {}, sent),
        Call(SPLIT, (sent, [each.elements for each in forms]), {}, parts),
        *(
            _shaped(part, each, call.result, sent, tape)
            for part, each, call in zip(parts, forms, bucket, strict=True)
        ),
    ]


def _shaped(part: Value, form: Form, result: Value, sent: Value, tape: Tape) -> Call:
    """`result` as a view of what the bucket made: its memory is that of the bucket."""
    before = tape.memory[result.number]
    for number, memory in enumerate(tape.memory):
        if memory == before:
            tape.memory[number] = sent.number
    return Call(VIEW, (part, list(form.shape)), {}, result)
