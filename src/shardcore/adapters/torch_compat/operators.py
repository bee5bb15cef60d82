"""Operators: those without a public name, and what their schemas say."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

# torch 2.13: a list of tensors is filled from another in one call by no public name.
LIST_COPY = torch.ops.aten._foreach_copy_.default

# Such operators that torch 2.13 does not tag as pointwise.
_NOT_TAGGED = """
clone copy elu_backward fill hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward
hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu_backward log_sigmoid_backward
log_sigmoid_forward masked_fill softplus_backward softshrink softshrink_backward zero
"""
_UNTAGGED = frozenset(_NOT_TAGGED.split())


@cache
def is_elementwise(operator: Any) -> bool:
    """Whether each element of a result depends on the same places of operands, and on no draw."""
    tags = operator.tags
    is_pointwise = torch.Tag.pointwise in tags or aten_name(operator) in _UNTAGGED
    return is_pointwise and torch.Tag.nondeterministic_seeded not in tags


@cache
def is_composite(operator: Any) -> bool:
    """Whether `operator` is made of others, by which `operator.decompose` runs it.

    torch 2.13: below autograd, and in inference mode, such operators arrive as they are.
    """
    return bool(operator.has_kernel_for_dispatch_key("CompositeImplicitAutograd"))


@cache
def is_list_operator(operator: Any) -> bool:
    """Whether `operator` is done to each tensor of a list: the operators of optimizers.

    It gives a list, or writes into the tensors of lists and gives nothing.
    """
    arguments, returns = operator._schema.arguments, operator._schema.returns
    written = [each for each in arguments if each.alias_info and each.alias_info.is_write]
    if not any(map(_is_list, arguments)) or is_composite(operator):
        return False
    if written:
        return written[0] is arguments[0] and all(map(_is_list, written))
    return len(returns) == 1 and _is_list(returns[0])


def is_fused(operator: Any) -> bool:
    """Whether `operator` is the whole update of an optimizer: parameters, gradients, moments."""
    return is_list_operator(operator) and writes_others(operator)


def _is_list(argument: Any) -> bool:
    return str(argument.type) == "List[Tensor]"


def frozen(nest: Any) -> Any:
    """`nest` with tuples in place of lists, to be a key."""
    return tuple(map(frozen, nest)) if isinstance(nest, list | tuple) else nest


def aten_name(operator: Any) -> str:
    """`add` of `aten.add_.Tensor`, and so on; empty of what is not ATen's."""
    schema = getattr(operator, "_schema", None)
    space, _, name = ("", "", "") if schema is None else schema.name.partition("::")
    return name.removesuffix("_") if space == "aten" else ""


def out_of_place(operator: Any) -> Any:
    """`squeeze` of `squeeze_`, and so on."""
    name = aten_name(operator)
    overload = "int" if name == "transpose" else operator._schema.overload_name
    return getattr(getattr(torch.ops.aten, name), overload)


@cache
def writing_into(operator: Any) -> tuple[Any, str] | None:
    """The variant of `operator` that writes its result into an operand, and that operand's name.

    None if torch has none on a CPU but what runs `operator` and copies.
    """
    space, _, name = operator._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name)
    for overload in packet.overloads():
        variant = getattr(packet, overload)
        operands = [each for each in variant._schema.arguments if not each.is_out]
        targets = [each.name for each in variant._schema.arguments if each.is_out]
        same = list(map(_declared, operands)) == list(map(_declared, operator._schema.arguments))
        if same and len(targets) == 1:
            return (variant, targets[0]) if variant.has_kernel_for_dispatch_key("CPU") else None
    return None


def _declared(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


def reshaped_in_place(operator: Any, target: torch.Tensor, *args: Any) -> Any:
    """Returns `target`, of a class of our own, with the shape that `operator` gives it.

    torch 2.13: an operator with the tag `inplace_view` changes what a tensor says of itself below
    where a tensor subclass is asked.
    """
    return return_and_correct_aliasing(operator, (target, *args), {}, target)  # type: ignore[no-untyped-call]


@cache
def is_view(operator: Any) -> bool:
    """Whether the results share the memory of the first operand, and nothing is written.

    torch 2.13: `OpOverload.is_view` says no of those that give a list, such as `unbind`.
    """
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write


@cache
def writes_first(operator: Any) -> bool:
    """Whether `operator` writes into its first operand."""
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


@cache
def writes_others(operator: Any) -> bool:
    """Whether `operator` writes into another operand than its first."""
    others = operator._schema.arguments[1:]
    return any(each.alias_info is not None and each.alias_info.is_write for each in others)


def written_operands(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The operands that `operator` writes into: tensors, and those of each list."""
    written: list[Any] = []
    for place, name in _written_arguments(operator):
        found = args[place] if place < len(args) else kwargs.get(name, ())
        written += as_tuple(found)
    return written


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that `operator` writes into."""
    schema = getattr(operator, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(
        (place, each.name)
        for place, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def as_tuple(found: Any) -> tuple[Any, ...]:
    """What an operator gave, one result or several."""
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def number_of_results(operator: Any) -> int:
    """How many tensors `operator` gives."""
    return len(operator._schema.returns)


@cache
def kind_of_results(operator: Any) -> str:
    """Whether an operator gives a "tensor", a "list" of tensors or a "tuple" of some or none."""
    returns = operator._schema.returns
    if len(returns) != 1:
        return "tuple"
    return "list" if _is_list(returns[0]) else "tensor"


def reads_values(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether the result of `operator` is a number, or has a shape, that depends on values.

    torch 2.13: an operator that takes indices has the tag of those that take masks.
    """
    tags = getattr(operator, "tags", ())
    if operator in _INDEXING:
        return any(isinstance(each, torch.Tensor) and each.dtype in _MASKS for each in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)


def direct(operator: Any) -> Any:
    """What `operator` calls: without a function of Python in between.

    torch 2.13: `OpOverload.__call__` is one, a fifth of the call of a small operator.
    """
    return getattr(operator, "_op", operator)


@cache
def draws(operator: Any) -> bool:
    """Whether `operator` draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
