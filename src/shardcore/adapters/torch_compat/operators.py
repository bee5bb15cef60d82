"""Operators: those without a public name, and what DTensor makes of one from below a handler."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

# torch 2.13: nests of operands are walked by a module without a public name.
tree_leaves = pytree.tree_leaves


tree_map_only = pytree.tree_map_only


# torch 2.13: operators that have no public name, as the dispatcher meets them.
ITEM = torch.ops.aten._local_scalar_dense.default


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


# By the number of dims that are averaged over.
ADAPTIVE_AVERAGES = {
    2: (
        torch.ops.aten._adaptive_avg_pool2d.default,
        torch.ops.aten._adaptive_avg_pool2d_backward.default,
    ),
    3: (
        torch.ops.aten._adaptive_avg_pool3d.default,
        torch.ops.aten._adaptive_avg_pool3d_backward.default,
    ),
}


CTC_LOSS = (torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor)


UNIQUE = torch.ops.aten._unique2.default


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


# Held while a handler is out of the dispatcher, where another thread would miss it.
ONE_AT_A_TIME = threading.RLock()


TORCHS_HANDLERS: dict[Any, Handler] = dict(DTensor._op_dispatcher._custom_op_handlers)


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor makes of `operator`, called from the handler that stands before it.

    torch 2.13: the dispatcher is written in C++ and looks into `_custom_op_handlers` first; there
    is no way to tell it to go on.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    with ONE_AT_A_TIME:
        handler = handlers.pop(operator)
        if operator in TORCHS_HANDLERS:
            handlers[operator] = TORCHS_HANDLERS[operator]
        try:
            return operator(*args, **kwargs)
        finally:
            handlers[operator] = handler


def writing_operators() -> list[Any]:
    """Every ATen operator that writes into its first operand: `add_`, `index_put_` and so on.

    torch 2.13: `torch.ops.aten` lists only operators that somebody has used.
    """
    names = torch._C._dispatch_get_all_op_names()
    found = []
    for name in names:
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space == "aten" and base.endswith("_") and not base.startswith("_"):
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            reshapes = torch.Tag.inplace_view in operator.tags
            if (
                not reshapes
                and writes_first(operator)
                and str(operator._schema.arguments[0].type) == "Tensor"
            ):
                found.append(operator)
    return found


def list_writing_operators() -> list[Any]:
    """Every ATen operator that writes into each tensor of a list: `_foreach_add_` and so on.

    torch 2.13: `torch.ops.aten` lists only operators that somebody has used.
    """
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition("::")[2].partition(".")
        if name.startswith("aten::_foreach_") and base.endswith("_"):
            found.append(getattr(getattr(torch.ops.aten, base), overload or "default"))
    return found


def frozen(nest: Any) -> Any:
    """`nest` with tuples in place of lists, to be a key."""
    return tuple(map(frozen, nest)) if isinstance(nest, list | tuple) else nest


def reshaping_operators() -> list[Any]:
    """The ATen operators that change the shape of their operand: `squeeze_` and its kind."""
    aten = torch.ops.aten
    return [
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.t_.default,
        aten.transpose_.default,
        aten.unsqueeze_.default,
    ]


def out_of_place(operator: Any) -> Any:
    """`squeeze` of `squeeze_`, and so on."""
    name = operator._schema.name.partition("::")[2].removesuffix("_")
    overload = "int" if name == "transpose" else operator._overloadname
    return getattr(getattr(torch.ops.aten, name), overload)


def become(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: DTensor) -> Any:
    """The first operand, now with the shape, the placements and the memory of `value`.

    torch 2.13: this is what the dispatcher does after an operator with the tag `inplace_view`.
    """
    target: Any = args[0]
    target._local_tensor = value._local_tensor
    target._spec = value._spec
    return return_and_correct_aliasing(operator, args, kwargs, target)  # type: ignore[no-untyped-call]


@cache
def is_view(operator: Any) -> bool:
    """Whether the results share the memory of the first operand, and nothing is written.

    torch 2.13: `OpOverload.is_view` says no of those that give a list, such as `unbind`.
    """
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write


def writes_first(operator: Any) -> bool:
    """Whether `operator` writes into its first operand."""
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


def number_of_results(operator: Any) -> int:
    """How many tensors `operator` gives."""
    return len(operator._schema.returns)
