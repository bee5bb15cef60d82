"""Rewrites the operators of a step on which Inductor fails or gives wrong results (ADR 19)."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import rewrite_calls
from shardcore.adapters.capture.trace import Call, Form, Number, Trace, values


def with_sizes(trace: Trace) -> Trace:
    """Adds the size of each `repeat_interleave`, which Inductor cannot know.

    `keras.ops.repeat` counts so, and with it metrics like `AUC`. The counts depend on nothing that
    changes: else the step is not captured.
    """
    return trace.with_calls(
        attrs.evolve(call, kwargs=call.kwargs | {"output_size": trace.form(call.result).shape[0]})
        if call.operator is _REPEAT
        else call
        for call in trace.calls
    )


_REPEAT: Any = torch.ops.aten.repeat_interleave.Tensor


def with_plain_paddings(trace: Trace) -> Trace:
    """Makes gradients of padding by the edge dense, as Inductor expects them.

    torch 2.13 gives the gradient the strides of the padded tensor, whose values it does not read;
    Inductor, which may have laid that out otherwise, ends the step. So the operator is given a
    dense tensor of the same shape.
    """

    def rewrite(call: Call, new_trace: Trace) -> Call:
        if call.operator not in _PADDING_BACKWARD:
            return call
        gradient, padded, *rest = call.args
        form = new_trace.form(padded)
        plain = new_trace.new(Form(form.shape, form.dtype, form.device))
        new_trace.calls.append(Call(_NEW, (padded, list(form.shape)), {}, plain, line=call.line))
        return attrs.evolve(call, args=(gradient, plain, *rest))

    return rewrite_calls(trace, rewrite)


_NEW: Any = torch.ops.aten.new_empty.default
_PADDING_BACKWARD = {
    torch.ops.aten.replication_pad1d_backward.default,
    torch.ops.aten.replication_pad2d_backward.default,
    torch.ops.aten.replication_pad3d_backward.default,
}


def with_reshapes(trace: Trace) -> Trace:
    """Replaces each view of what is not written into by a reshape.

    What Inductor makes of an operator may have other strides than the operator's result, so that
    there is no such view: in torch 2.13 a `stack` of one tensor has those of the tensor. The result
    of a collective stays viewed: a reshape that copies would copy it before it is there.
    """
    waits = (call for call in trace.calls if call.is_wait)
    waited_for = {memory for call in waits for memory in trace.reads_of(call)}
    stay_viewed = trace.overwritten() | waited_for
    return trace.with_calls(
        attrs.evolve(call, operator=torch.ops.aten.reshape.default)
        if call.operator is torch.ops.aten.view.default and not trace.reads_of(call) & stay_viewed
        else call
        for call in trace.calls
    )


def with_factors_apart(trace: Trace) -> Trace:
    """Rewrites `add(x, y, alpha=factor)` as `add(x, y * factor)`.

    Inductor takes no number of a tensor; and torch 2.13 forgets any factor where `x` or `y` is a
    matrix product, in silence, as it makes `addmm` of both:
    https://github.com/pytorch/pytorch/issues/167313 reports the same. The product is rounded,
    which the sum alone would not do: the last bit may be another one.
    """

    def rewrite(call: Call, new_trace: Trace) -> Call:
        factor = call.kwargs.get("alpha")
        if factor is None or not _must_multiply(call, factor, trace):
            return call
        first, _, *rest = call.args
        args = (first, _scaled(call, factor, new_trace), *rest)
        kwargs = {name: argument for name, argument in call.kwargs.items() if name != "alpha"}
        return attrs.evolve(call, args=args, kwargs=kwargs)

    return rewrite_calls(trace, rewrite)


def _must_multiply(call: Call, factor: Any, trace: Trace) -> bool:
    """Finds the calls whose factor Inductor would ignore.

    Of operands of two dtypes the product would be rounded to that of the second; Inductor makes no
    `addmm` of them.
    """
    name = torch_private.aten_name(call.operator)
    if isinstance(factor, Number):
        is_scaling = torch_private.is_list_operator(call.operator) or name in _SCALING
    else:
        is_scaling = name == "add"
    if not is_scaling:
        return False
    dtypes = {trace.form(value).dtype for value in values(call.args[:2])}
    return len(dtypes) == 1 and bool(values(call.args[1]))


# Operators whose `alpha` is, as that of those on lists, a factor of their second operand.
_SCALING = {"add", "sub", "addmm", "addmv", "addr", "addbmm", "baddbmm"}


def _scaled(call: Call, factor: Any, trace: Trace) -> Any:
    by = factor.value if isinstance(factor, Number) else factor

    def times(value: Any) -> Any:
        result = trace.new(trace.form(value))
        operator = torch.ops.aten.mul.Tensor
        trace.calls.append(Call(operator, (value, by), {}, result, (), call.line))
        return result

    return torch_private.tree_map(times, call.args[1])


# Multiplications. Of fewer, a product takes little more than its call.
LARGE = 2**24


def with_onednn_products(trace: Trace, onednn: torch_private.OneDnn) -> Trace:
    """Computes the large float32 matrix products on a CPU by oneDNN.

    Measured on an AMD EPYC with AVX-512, one thread: 80 to 105 billion operations a second, where
    MKL does 64 to 95. On an Intel Xeon MKL is faster, with 139 to 186, by up to a fifth.
    """
    if not torch_private.has_onednn() or torch_private.is_intel():
        return trace
    return trace.with_calls(
        attrs.evolve(call, operator=onednn.product()) if _is_faster(call, trace) else call
        for call in trace.calls
    )


def _is_faster(call: Call, trace: Trace) -> bool:
    """Decides by the forms of the operands, which are the same on all ranks.

    A first operand that is transposed, as for the gradient of a kernel, stays with MKL: some
    of those products are slower by oneDNN.
    """
    if call.operator not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return False
    left, right = (trace.form(operand) for operand in call.args)
    is_matrix = len(left.shape) == 2 or left.shape[0] == 1
    is_large = left.elements * right.shape[-1] >= LARGE
    is_plain = left.device.type == "cpu" and left.dtype is torch.float32
    return is_matrix and is_large and is_plain and left.strides[-1] == 1
