"""Quotients that are taken away from a tensor: how most optimizers end."""

from collections import Counter

import attrs
import torch

from shardcore.adapters.capture.tape import Call, Form, Number, Tape, Value, values

aten = torch.ops.aten


def with_quotients_at_once(tape: Tape) -> Tape:
    """`p -= m * rate / d` is one call in place of three, with the same bits.

    That call computes `p + (-rate * m) / d`: a sign changes no rounding. On a CPU it goes once over
    its tensors, which the three do three times. Not in half precision, where torch rounds only at
    the end of a call.
    """
    read = Counter(value for call in tape.calls for value in call.operands)
    read.update(values(tape.outputs))
    makers = {call.result: place for place, call in enumerate(tape.calls) if _is_plain(call)}
    found = tape.with_calls([])
    left_out: set[int] = set()
    instead: dict[int, list[Call]] = {}
    for place, call in enumerate(tape.calls):
        steps = _steps(call, makers, tape)
        if steps is None or any(read[tape.calls[each].result] > 1 for each in steps):
            continue
        if _is_written(tape, *steps, place):
            continue
        left_out.update(steps)
        product, quotient = (tape.calls[each] for each in steps)
        instead[place] = _at_once(product, quotient, call, found)
    for place, call in enumerate(tape.calls):
        if place not in left_out:
            found.calls += instead.get(place, [call])
    return found


def _is_plain(call: Call) -> bool:
    """Whether it is a product or a quotient, in memory of its own."""
    return call.operator in (aten.mul.Tensor, aten.div.Tensor)


def _steps(call: Call, makers: dict[Value, int], tape: Tape) -> tuple[int, int] | None:
    """Where the product and the quotient are that `call` takes away; None if it takes none."""
    if call.operator is not aten.add_.Tensor or call.kwargs.get("alpha") != -1:
        return None
    target, taken = call.args
    quotient = makers.get(taken)
    if quotient is None or tape.calls[quotient].operator is not aten.div.Tensor:
        return None
    over, under = tape.calls[quotient].args
    product = makers.get(over)
    if product is None or tape.calls[product].operator is not aten.mul.Tensor:
        return None
    moment, rate = tape.calls[product].args
    if not all(isinstance(each, Value) for each in (moment, rate, under)):
        return None
    if _share_memory(tape, target, moment, under):
        return None  # they may be other views of what is written
    forms = [tape.form(each) for each in (target, moment, under)]
    alike = all(_is_alike(each, forms[0]) for each in forms) and not tape.form(rate).shape
    return (product, quotient) if alike and tape.form(rate).dtype is forms[0].dtype else None


def _share_memory(tape: Tape, target: Value, *others: Value) -> bool:
    """Whether one of the others lies in the target's memory."""
    return tape.memory[target.number] in {tape.memory[each.number] for each in others}


def _is_alike(form: Form, first: Form) -> bool:
    exact = form.dtype in (torch.float32, torch.float64) and form.device.type == "cpu"
    return exact and (form.shape, form.dtype) == (first.shape, first.dtype)


def _is_written(tape: Tape, product: int, quotient: int, last: int) -> bool:
    """Whether something is written between them that the last would read too late."""
    reads = tape.reads_of(tape.calls[product])
    for place in range(product + 1, last):
        if place == quotient:
            reads = reads | tape.reads_of(tape.calls[quotient])
        elif tape.writes_of(tape.calls[place]) & reads:
            return True
    return False


def _at_once(product: Call, quotient: Call, last: Call, tape: Tape) -> list[Call]:
    """What takes their place."""
    moment, rate = product.args
    falling = tape.new(tape.form(rate))
    return [
        Call(aten.neg.default, (rate,), {}, falling, (), last.line, last.backward),
        attrs.evolve(
            last,
            operator=aten.addcdiv_.default,
            args=(last.args[0], moment, quotient.args[1]),
            kwargs={"value": Number(falling)},
        ),
    ]
