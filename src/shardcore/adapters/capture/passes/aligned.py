"""Products read and write memory that begins where a tensor of its own would."""

from itertools import accumulate
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.buckets import FLATTEN, ROUND_BYTES, SPLIT
from shardcore.adapters.capture.passes.order import is_view
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed


def is_aligned(elements: int, dtype: torch.dtype) -> bool:
    """Whether what comes after so many elements begins as a tensor of its own would."""
    return elements * dtype.itemsize % ROUND_BYTES == 0


def with_aligned_products(tape: Tape) -> Tape:
    """What a product reads out of a bucket is copied first, unless it lies there as by itself.

    MKL computes a product in another order where an operand begins elsewhere: last bits differ.

    Args:
        tape: A step whose all-reduces are in buckets, and done in place.
    """
    found = tape.with_calls([])
    buckets = {tape.memory[call.result.number] for call in tape.calls if call.operator is FLATTEN}
    unaligned: set[Value] = set()
    for call in tape.calls:
        if call.operator is SPLIT and tape.memory[call.args[0].number] in buckets:
            unaligned |= _unaligned_parts(call, tape)
        elif is_view(call, tape) and unaligned & set(call.operands):
            unaligned |= set(call.results)
        elif call.operator in _PRODUCTS:
            call = _on_copies(call, unaligned & set(call.operands), found)  # noqa: PLW2901
        found.calls.append(call)
    return found


def _unaligned_parts(split: Call, tape: Tape) -> set[Value]:
    whole, sizes = split.args
    before = accumulate(sizes, initial=0)
    pairs = zip(split.result, before, strict=False)
    return {part for part, start in pairs if not is_aligned(start, tape.form(whole).dtype)}


def _on_copies(call: Call, operands: set[Value], tape: Tape) -> Call:
    """`call`, which is appended later, on copies of `operands`, which are appended now."""
    copies = {operand: tape.new(tape.form(operand)) for operand in operands}
    tape.calls += [Call(_CLONE, (value,), {}, copy) for value, copy in copies.items()]
    args, kwargs = renamed((call.args, call.kwargs), copies)
    return attrs.evolve(call, args=args, kwargs=kwargs)


_CLONE = torch.ops.aten.clone.default
_PRODUCTS: frozenset[Any] = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.mv.default,
        torch.ops.aten.dot.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
        torch_compat.CPU_ATTENTION,
        torch_compat.CPU_ATTENTION_BACKWARD,
    }
)
