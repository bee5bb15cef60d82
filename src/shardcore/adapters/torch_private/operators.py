"""Properties of operators, from their tags and schemas."""

from collections.abc import Collection
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardcore.adapters.torch_private.trees import Args, Kwargs


class Operator(Protocol):
    """An operator of torch, such as `torch.ops.aten.add.Tensor`, whose class is private."""

    _schema: Any

    @property
    def namespace(self) -> str:
        """The name of its library: "aten"."""

    @property
    def overloadpacket(self) -> Any:
        """The operator with all its overloads: `torch.ops.aten.add`."""

    @property
    def tags(self) -> Collection[torch.Tag]:
        """Properties that torch gives it."""

    def __hash__(self) -> int:
        """Hashes its identity."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Runs the operator."""

    def decompose(self, *args: object, **kwargs: object) -> Any:
        """Runs a composite operator by others."""

    def has_kernel_for_dispatch_key(self, key: torch.DispatchKey) -> bool:
        """Looks for a kernel that is registered for `key`."""


# torch 2.13: no public name copies a list of tensors into another in one call.
LIST_COPY = torch.ops.aten._foreach_copy_.default

# Elementwise operators that torch 2.13 does not tag as pointwise.
_NOT_TAGGED = """
clone complex copy elu_backward fill hardshrink hardshrink_backward hardsigmoid
hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu
leaky_relu_backward log_sigmoid_backward log_sigmoid_forward masked_fill softplus_backward
softshrink softshrink_backward zero
"""
_UNTAGGED = frozenset(_NOT_TAGGED.split())


@cache
def is_elementwise(operator: Operator) -> bool:
    """Reads torch's tag, and `_UNTAGGED`; leaves out random operators."""
    tags = operator.tags
    is_pointwise = torch.Tag.pointwise in tags or aten_name(operator) in _UNTAGGED
    return is_pointwise and torch.Tag.nondeterministic_seeded not in tags


@cache
def is_composite(operator: Operator) -> bool:
    """Tells whether `operator.decompose` runs it by other operators.

    torch 2.13: below autograd, and in inference mode, such operators arrive as they are.
    """
    return operator.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


@cache
def is_list_operator(operator: Operator) -> bool:
    """Tells whether `operator` applies to each tensor of a list, as those of optimizers do.

    It returns a list, or writes into the tensors of lists and returns None.
    """
    arguments, returns = operator._schema.arguments, operator._schema.returns
    written = [
        argument for argument in arguments if argument.alias_info and argument.alias_info.is_write
    ]
    if not any(map(_is_list, arguments)) or is_composite(operator):
        return False
    if written:
        return written[0] is arguments[0] and all(map(_is_list, written))
    return len(returns) == 1 and _is_list(returns[0])


def is_fused(operator: Operator) -> bool:
    """Finds the optimizer updates that write parameters and moments in one call."""
    return is_list_operator(operator) and writes_others(operator)


def is_skippable(operator: Operator) -> bool:
    """Finds the fused updates that do nothing if their `found_inf` is 1."""
    return is_fused(operator) and "found_inf" in (
        argument.name for argument in operator._schema.arguments
    )


def _is_list(argument: Any) -> bool:
    return str(argument.type) == "List[Tensor]"


def aten_name(operator: object) -> str:
    """Finds `add` for `aten.add_.Tensor`, and so on; empty for operators outside ATen."""
    schema = getattr(operator, "_schema", None)
    space, _, name = ("", "", "") if schema is None else schema.name.partition("::")
    return name.removesuffix("_") if space == "aten" else ""


def out_of_place(operator: Operator) -> Any:
    """Looks up `squeeze` for `squeeze_`, and so on."""
    name = aten_name(operator)
    overload = "int" if name == "transpose" else operator._schema.overload_name
    return getattr(getattr(torch.ops.aten, name), overload)


@cache
def writing_into(operator: Operator) -> tuple[Any, str] | None:
    """Finds the variant of `operator` that writes into an operand, and that operand's name.

    None if torch has none on a CPU, or one that runs `operator` and copies.
    """
    space, _, name = operator._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name)
    for overload in packet.overloads():
        variant = getattr(packet, overload)
        operands = [argument for argument in variant._schema.arguments if not argument.is_out]
        targets = [argument.name for argument in variant._schema.arguments if argument.is_out]
        same = list(map(_declared, operands)) == list(map(_declared, operator._schema.arguments))
        if same and len(targets) == 1:
            return (variant, targets[0]) if variant.has_kernel_for_dispatch_key("CPU") else None
    return None


def _declared(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


def reshaped_in_place(operator: Operator, target: torch.Tensor, *args: object) -> Any:
    """Changes the shape of `target`, of a tensor subclass, as `operator` says.

    torch 2.13: an operator with the tag `inplace_view` changes the metadata of a tensor below the
    dispatch of tensor subclasses.
    """
    return return_and_correct_aliasing(operator, (target, *args), {}, target)  # type: ignore[no-untyped-call]


@cache
def is_view(operator: Operator) -> bool:
    """Tells whether the results share the memory of the first operand, without a write.

    torch 2.13: `OpOverload.is_view` is False for operators that return a list, such as `unbind`.
    """
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write


@cache
def writes_first(operator: object) -> bool:
    """Reads the schema: true for `add_`, false for `add`."""
    return any(position == 0 for position, _ in _written_arguments(operator))


@cache
def writes_others(operator: object) -> bool:
    """Reads the schema: true for `out=` and for fused updates of optimizers."""
    return any(position > 0 for position, _ in _written_arguments(operator))


def written_operands(
    operator: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[Any]:
    """Lists the operands that `operator` writes into: tensors, and those of each list."""
    if aten_name(operator) in _BATCH_NORMS and not args[5]:  # the argument `training`
        return []
    written: list[Any] = []
    for position, name in _written_arguments(operator):
        operand = args[position] if position < len(args) else kwargs.get(name)
        written += () if operand is None else as_tuple(operand)
    return written


# They write running statistics, which their schemas do not say (torch 2.13).
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_GATHERS = {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
_STATISTICS = _BATCH_NORMS | _GATHERS | {"batch_norm_update_stats"}


@cache
def _written_arguments(operator: object) -> tuple[tuple[int, str], ...]:
    schema = getattr(operator, "_schema", None)
    arguments = () if schema is None else schema.arguments
    has_statistics = aten_name(operator) in _STATISTICS
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (has_statistics and argument.name.startswith("running_"))
    )


def as_tuple(results: object) -> tuple[Any, ...]:
    """Wraps a single result."""
    return tuple(results) if isinstance(results, list | tuple) else (results,)


def number_of_results(operator: Operator) -> int:
    """Counts declared results: a list is one."""
    return len(operator._schema.returns)


def without_results(operator: Operator) -> tuple[Any, ...]:
    """Lists, for each result of `operator`, None if it is a tensor, and 0 if it is a number."""
    returns = operator._schema.returns
    return tuple(None if str(declared.type) == "Tensor" else 0 for declared in returns)


def arguments_of(operator: Operator, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Names the arguments of a call, and adds those with default values."""
    declared = operator._schema.arguments
    defaults = {
        argument.name: argument.default_value
        for argument in declared
        if argument.has_default_value()
    }
    given = (argument.name for argument in declared if not argument.kwarg_only)
    return {**defaults, **dict(zip(given, args, strict=False)), **kwargs}


@cache
def kind_of_results(operator: Operator) -> str:
    """Reads the type of the results of `operator`: "tensor", "list" or "tuple".

    It is "tuple with list" for a tuple whose last element is a list.
    """
    returns = operator._schema.returns
    if len(returns) != 1:
        return "tuple with list" if returns and _is_list(returns[-1]) else "tuple"
    return "list" if _is_list(returns[0]) else "tensor"


def reads_values(operator: object, args: tuple[Any, ...]) -> bool:
    """Tells whether the result is a number, or has a shape, that depends on values.

    torch 2.13: operators that take indices have the same tag as operators that take masks.
    """
    tags = getattr(operator, "tags", ())
    if operator in _INDEXING:
        return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def may_read_values(operator: object) -> bool:
    """Tells whether `reads_values` may hold, whatever the operands are."""
    tags = getattr(operator, "tags", ())
    return operator in _INDEXING or not {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
    }.isdisjoint(tags)


_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)


def direct(operator: object) -> Any:
    """Looks up the function of `operator` in C++.

    torch 2.13: `OpOverload.__call__` is Python, and a fifth of the time of a small operator.
    """
    if needs_grad_mode(operator):
        return _recurrent
    return getattr(operator, "_op", operator)


def needs_grad_mode(operator: object) -> bool:
    """Finds an operator that returns less where no gradients are recorded, as in a program."""
    return operator is _RECURRENT


def _recurrent(*args: Any) -> Any:
    """Runs oneDNN's recurrent layer as where gradients are recorded.

    torch 2.10 to 2.15: elsewhere it returns no workspace, which its backward pass needs.
    """
    with torch.enable_grad():
        return _RECURRENT(*(x.detach() if isinstance(x, torch.Tensor) else x for x in args))


@cache
def draws(operator: object) -> bool:
    """Counts what reads or sets the state of a random generator too."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
