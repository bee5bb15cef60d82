"""The copy that softmax makes of its operand, as a call of its own."""

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.pooling import CLONE
from shardcore.adapters.capture.tape import Call, Form, Tape


def with_softmax_copies_apart(tape: Tape) -> Tape:
    """What softmax reads is copied before it, where torch would copy it within the operator.

    So the operand can go before the result is there. The logits of a language model, which Keras
    has with the classes first, are the largest tensors of a step. On a CPU only.
    """
    found = tape.with_calls([])
    for each in tape.calls:
        call = each
        if call.operator in torch_compat.SOFTMAX and _is_copied(found.form(call.args[0])):
            form = found.form(call.args[0])
            copy = found.new(Form(form.shape, form.dtype, form.device))
            order = {"memory_format": torch.contiguous_format}
            found.calls.append(Call(CLONE, (call.args[0],), order, copy, line=call.line))
            call = attrs.evolve(call, args=(copy, *call.args[1:]))
        found.calls.append(call)
    return found


def _is_copied(form: Form) -> bool:
    """Whether the elements of an operand do not lie one after the other."""
    strided = torch.empty_strided(form.shape, form.strides, device="meta")
    return form.device.type == "cpu" and not strided.is_contiguous()
