"""Operators whose bits do not hang on where a loop of torch begins or ends."""

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape


def is_exact(call: Call, tape: Tape) -> bool:
    """Whether an element is the same in a vector and by itself.

    torch 2.13 computes what does not fill a vector one by one. That is the same for what IEEE 754
    rounds, and another last bit for `sigmoid`, `pow` and others, and for complex products.

    Args:
        call: That of a pointwise operator.
        tape: The step.
    """
    if any(tape.form(each).dtype.is_complex for each in call.operands):
        return False
    name = torch_compat.aten_name(call.operator)
    if name == "pow":
        return bool(call.args[1] == 2)
    factor = call.kwargs.get("alpha", 1)
    return name in _EXACT and factor in (1, -1) and "rounding_mode" not in call.kwargs


_EXACT = {
    *("add", "sub", "mul", "div", "addcdiv", "sqrt", "neg", "abs", "square"),
    *("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "threshold_backward"),
    *("where", "eq", "ne", "lt", "le", "gt", "ge", "sign", "floor", "ceil", "round", "trunc"),
    *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"),
}
