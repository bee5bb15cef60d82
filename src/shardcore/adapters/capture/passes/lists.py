"""Operators on lists of tensors, as optimizers have them, do the large ones one by one."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.chains import BLOCK
from shardcore.adapters.capture.tape import Call, Tape, Value, values


def with_large_apart(tape: Tape, least: int = BLOCK) -> Tape:
    """Each large tensor has calls of its own, which may then run in blocks.

    On a CPU torch runs an operator on lists as one on each tensor. On a GPU it is one kernel, which
    is left as it is.

    Args:
        tape: A step.
        least: The elements of a tensor that is large. For a smaller one a call of its own costs
            more than it may save.
    """
    return tape.with_calls(one for call in tape.calls for one in _apart(call, tape, least))


def _apart(call: Call, tape: Tape, least: int) -> list[Call]:
    single = _SINGLE.get(call.operator)
    if single is None:
        return [call]
    length = len(call.args[0])
    forms = [tape.form(each) for each in call.args[0]]
    large = [n for n in range(length) if forms[n].elements >= least and _is_on_cpu(forms[n])]
    small = [n for n in range(length) if n not in large]
    calls = [_one(call, single, place) for place in large]
    if small and large:
        calls.append(_some(call, small))
    return calls or [call]


def _is_on_cpu(form: Any) -> bool:
    return bool(form.device.type == "cpu")


def _one(call: Call, single: Any, place: int) -> Call:
    """What `call` does to the tensors at `place` of its lists."""
    args = tuple(each[place] if isinstance(each, list) else each for each in call.args)
    if call.writes:
        return attrs.evolve(call, operator=single, args=args, result=args[0], writes=(args[0],))
    return attrs.evolve(call, operator=single, args=args, result=call.result[place])


def _some(call: Call, places: list[int]) -> Call:
    """What `call` does to the tensors at `places`."""

    def taken(each: Any) -> Any:
        return [each[place] for place in places] if isinstance(each, list) else each

    args = tuple(map(taken, call.args))
    writes: tuple[Value, ...] = tuple(values(args[0])) if call.writes else ()
    return attrs.evolve(call, args=args, result=taken(call.result), writes=writes)


def _single_operators() -> dict[Any, Any]:
    """By operator on lists, the one that torch runs on each of their tensors."""
    found = {}
    for name in ("add", "sub", "mul", "div", "sqrt", "neg", "abs"):
        for suffix in ("", "_"):
            lists = torch_compat.list_operator(name + suffix)
            one = getattr(torch.ops.aten, f"{name}{suffix}")
            for overload in lists.overloads():
                if overload in _OVERLOADS:
                    found[getattr(lists, overload)] = getattr(one, _OVERLOADS[overload])
    return found


# A plain number is taken as a tensor is, by which torch has a variant that is told where to write.
_OVERLOADS = {"default": "default", "List": "Tensor", "Scalar": "Tensor", "Tensor": "Tensor"}
_SINGLE = _single_operators()
