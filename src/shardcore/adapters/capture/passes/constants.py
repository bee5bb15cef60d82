"""Computes once, when a program is made, what depends on constants alone."""

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace import Call, Literals, Number, Trace, Value, values

# A program holds results of up to so many bytes each: tables of positions, not masks of a window.
SMALL_BYTES = 64 * 1024


def with_constants(trace: Trace, literals: Literals) -> Trace:
    """Runs the calls that read constants alone and make small results, which the program holds.

    Args:
        trace: A step.
        literals: Its constants.
    """
    changing = trace.overwritten() | trace.memories(values(trace.outputs))
    constants = {n: tensor for n, tensor in literals.items() if trace.memory[n] not in changing}
    calls = []
    for call in trace.calls:
        is_known = {value.number for value in call.operands} <= constants.keys()
        if (
            is_known
            and _is_small(call, trace)
            and changing.isdisjoint(trace.memories(call.results))
        ):
            constants |= _results(call, constants)
        else:
            calls.append(call)
    new_trace = trace.with_calls(calls)
    read = {value.number for call in calls for value in call.operands}
    made = constants.keys() - literals.keys()
    new_trace.buffers = trace.buffers | {number: constants[number] for number in made & read}
    return new_trace


def _is_small(call: Call, trace: Trace) -> bool:
    """Finds operators of torch that give small results, the same in each run."""
    is_pure = call.name.startswith("aten.") and not (call.writes or call.draws)
    if not is_pure or call.name.startswith("aten.empty") or not call.results:
        return False
    if torch_private.needs_grad_mode(call.operator):
        return False
    forms = [trace.forms[value.number] for value in (*call.operands, *call.results)]
    return all(form is not None and form.bytes <= SMALL_BYTES for form in forms)


def _results(call: Call, constants: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Runs `call`, and returns its results by number."""

    def tensor_of(leaf: object) -> object:
        if isinstance(leaf, Number):
            return constants[leaf.value.number].item()
        return constants[leaf.number] if isinstance(leaf, Value) else leaf

    args, kwargs = torch_private.tree_map(tensor_of, (call.args, call.kwargs))
    with torch.no_grad():
        leaves = torch_private.tree_leaves(call.operator(*args, **kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {value.number: tensor for value, tensor in zip(call.results, tensors, strict=True)}
