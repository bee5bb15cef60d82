"""Joins all-reduces into buckets; those of losses and metrics come last."""

import math
from collections import Counter
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import needs_of
from shardcore.adapters.capture.checks import check
from shardcore.adapters.capture.passes.cleanup import VIEW
from shardcore.adapters.capture.tape import Call, Form, Tape

# The elements of a tensor that is small: a loss, a count, the counts of some classes.
SMALL = 64


def with_small_sums_last(tape: Tape) -> Tape:
    """Returns `tape` with small all-reduces last, side by side, and all that depends on them.

    One on which a large tensor depends stays where it is.
    """
    needs = needs_of(tape)
    fixed: set[int] = set()  # the places of large calls, and of those on which they depend
    for place, call in reversed(list(enumerate(tape.calls))):
        if place in fixed or not _is_small(tape, call):
            fixed |= {place, *needs[place]}
    stages: dict[int, int] = {}  # by place of what is moved, how many all-reduces come before it
    for place, call in enumerate(tape.calls):
        before = [
            stages[each] + tape.calls[each].is_all_reduce for each in needs[place] & stages.keys()
        ]
        if place not in fixed and (before or call.is_all_reduce):
            stages[place] = max(before, default=0)
    rest = (place for place in range(len(tape.calls)) if place not in stages)
    last = sorted(stages, key=stages.__getitem__)
    return tape.with_calls(tape.calls[place] for place in (*rest, *last))


def _is_small(tape: Tape, call: Call) -> bool:
    if call.operator is check:  # a step that may be left there should not have gone far
        return False
    touched = (*call.operands, *call.results)
    forms = [tape.forms[value.number] for value in touched]
    return all(form is not None and form.elements <= SMALL for form in forms) and (
        call.is_all_reduce or call.is_wait or not torch_private.is_of_collectives(call.operator)
    )


# As in `DistributedDataParallel`: the latency of a collective is negligible.
BUCKET_BYTES = 25 * 1024 * 1024
# Fewer bytes go into one bucket: they take less time than the latency of a collective.
SMALL_BYTES = 1024 * 1024
# torch 2.13: the alignment of tensors on a CPU (c10::gAlignment); on a GPU it is a multiple of it.
ROUND_BYTES = 64

FLATTEN = torch.ops.aten.flatten_dense_tensors.default
SPLIT = torch.ops.aten.split_with_sizes.default


def in_buckets(tape: Tape, most: int = BUCKET_BYTES, small: int = SMALL_BYTES) -> Tape:
    """Returns `tape` with all-reduces joined into buckets.

    A bucket has one operation, dtype and group. It starts at the place of its last all-reduce, or
    earlier if a call needs a result. For `n` bytes there are at most `ceil(n / most) + 1` buckets
    of about one size: all but the last overlap with the backward pass. `small` bytes or fewer go
    into one bucket.
    """
    found = tape.with_calls([])
    buckets: dict[Any, _Bucket] = {}
    sizes = _sizes(tape, most, small)
    chunks: list[list[Call]] = []
    for call in tape.calls:
        due = [key for key, each in buckets.items() if each.is_touched(call, tape)]
        for key in due:
            buckets.pop(key).send(found)
        if call.is_all_reduce:
            key = _kind(call, tape)
            chunks.append([])
            bucket = buckets.setdefault(key, _Bucket())
            bucket.add(call, chunks[-1], tape)
            if bucket.bytes >= sizes[key]:
                buckets.pop(key).send(found)
        elif not any(each.waits(call, tape) for each in buckets.values()):
            chunks.append([call])
    for bucket in buckets.values():
        bucket.send(found)
    found.calls = [call for chunk in chunks for call in chunk]
    return found


def _kind(call: Call, tape: Tape) -> Any:
    """Returns the key of the bucket: operation, group, dtype and device."""
    form = tape.form(call.args[0])
    return (*call.args[1:], form.dtype, form.device)


def _sizes(tape: Tape, most: int, small: int) -> dict[Any, int]:
    """Returns, by key, the bytes after which a bucket starts."""
    bytes_of: Counter[Any] = Counter()
    for call in tape.calls:
        if call.is_all_reduce:
            bytes_of[_kind(call, tape)] += tape.bucket_bytes(call)
    return {
        kind: most if total <= small else math.ceil(total / (math.ceil(total / most) + 1))
        for kind, total in bytes_of.items()
    }


@attrs.define
class _Bucket:
    """All-reduces that have not started yet.

    Args:
        place: The calls at the place of the last one.
    """

    place: list[Call] = attrs.field(factory=list)
    calls: list[Call] = attrs.field(factory=list)
    bytes: int = 0
    _made: set[int] = attrs.field(factory=set)
    _read: set[int] = attrs.field(factory=set)

    def add(self, call: Call, place: list[Call], tape: Tape) -> None:
        self.place = place
        self.calls.append(call)
        self.bytes += tape.bucket_bytes(call)
        self._made |= tape.writes_of(call)
        self._read |= tape.reads_of(call)

    def waits(self, call: Call, tape: Tape) -> bool:
        """Returns whether `call` waits for one of them."""
        return call.is_wait and bool(tape.reads_of(call) & self._made)

    def is_touched(self, call: Call, tape: Tape) -> bool:
        """Returns whether `call` needs a result, or writes into an operand."""
        if self.waits(call, tape):
            return False
        touched = tape.reads_of(call) | tape.writes_of(call)
        return bool(touched & self._made or tape.writes_of(call) & self._read)

    def send(self, tape: Tape) -> None:
        """Starts the bucket at its place, and waits for it; a later pass moves the wait."""
        if len(self.calls) > 1:
            self.place += _together(self.calls, tape)
            return
        (only,) = self.calls
        self.place += [only, Call(torch_private.wait_for(), (only.result,), {}, only.result)]


def _together(bucket: list[Call], tape: Tape) -> list[Call]:
    """Returns the calls that do those of `bucket` in one collective.

    Tensors of odd sizes come last, so that the others are aligned in memory.
    """
    bucket = sorted(bucket, key=lambda call: tape.form(call.args[0]).bytes % ROUND_BYTES != 0)
    first = bucket[0]
    form = tape.form(first.args[0])
    forms = [tape.form(call.args[0]) for call in bucket]
    whole = Form((sum(each.elements for each in forms),), form.dtype, form.device)
    sent, reduced = tape.new(whole), tape.new(whole)
    parts = [
        tape.new(Form((each.elements,), each.dtype, each.device), reduced.number) for each in forms
    ]
    tape.share({call.result: reduced for call in bucket})  # results are views of the bucket
    return [
        Call(FLATTEN, ([call.args[0] for call in bucket],), {}, sent),
        attrs.evolve(first, args=(sent, *first.args[1:]), result=reduced),
        Call(torch_private.wait_for(), (reduced,), {}, reduced),
        Call(SPLIT, (reduced, [each.elements for each in forms]), {}, parts),
        *(
            Call(VIEW, (part, list(each.shape)), {}, call.result)
            for part, each, call in zip(parts, forms, bucket, strict=True)
        ),
    ]
