"""What a recording of a step needs of torch: every operator on plain tensors, as it is run."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.adapters.torch_compat.listening import moving
from shardcore.adapters.torch_compat.trees import tree_leaves

# torch 2.13: wraps the result of a collective for autograd; what is wrapped is known by then.
WRAPPING = "_c10d_functional::_wrap_tensor_autograd"

# Marks a part of a step for people who profile it, as optimizers of torch do: it computes nothing.
PROFILER = "profiler::"


class OperatorListener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every operator on plain tensors that this thread runs, before and after it ran.

    Operators on sharded tensors are not told: what those make of them on plain parts is.

    torch 2.13: `TorchDispatchMode` has no public name.

    Args:
        before: Called with the operator and its operands; returns None where `after` has no use.
        after: Called with the operator, its operands, what `before` returned, and the result.
    """

    def __init__(
        self,
        before: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        after: Callable[[Any, tuple[Any, ...], dict[str, Any], Any, Any], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a sharded tensor first: what it makes of it comes here next
        kwargs = kwargs or {}
        name = func._schema.name
        if name == WRAPPING or name.startswith(PROFILER) or _is_without_values((args, kwargs)):
            return func(*args, **kwargs)
        found = self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if found is not None and not _is_without_values(result):
            self._after(func, args, kwargs, found, result)
        return result


# FakeTensor: a library works out shapes, for which nothing is told.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


def _is_without_values(nest: Any) -> bool:
    return True in [
        leaf.is_meta or isinstance(leaf, FakeTensor)
        for leaf in tree_leaves(nest)
        if isinstance(leaf, torch.Tensor)
    ]


def reads_values(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether the result of `operator` is a number, or has a shape, that hangs on values.

    torch 2.13: an operator that takes indices has the tag of those that take masks.
    """
    tags = getattr(operator, "tags", ())
    if operator in _INDEXING:
        return any(isinstance(each, torch.Tensor) and each.dtype in _MASKS for each in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)


def is_collective(operator: Any) -> bool:
    """Whether `operator` starts a collective of tensors."""
    return bool(collective_name(operator))


def collective_name(operator: Any) -> str:
    """What `operator` starts: "all_reduce" and so on; empty if it starts no collective."""
    name = _name(operator)
    return moving(name) if name.startswith("_c10d_functional::") else ""


def wait_for() -> Any:
    """The operator that waits for the collective that makes a tensor."""
    return torch.ops._c10d_functional.wait_tensor.default


def all_reduce_in_place() -> Any:
    """The operator that starts an all-reduce whose result takes the place of its operand."""
    return torch.ops._c10d_functional.all_reduce_.default


def is_all_reduce(operator: Any) -> bool:
    """Whether `operator` starts an all-reduce whose result is a tensor of its own."""
    return _name(operator) == "_c10d_functional::all_reduce"


def is_wait(operator: Any) -> bool:
    """Whether `operator` waits for a collective."""
    return _name(operator) == "_c10d_functional::wait_tensor"


def _name(operator: Any) -> str:
    # A torch without torch.distributed has none of them: they are known by name.
    schema = getattr(operator, "_schema", None)
    return "" if schema is None else str(schema.name)


def is_of_collectives(operator: Any) -> bool:
    """Whether `operator` starts a collective, or waits for one."""
    return getattr(operator, "namespace", "") in ("_c10d_functional", "c10d")


def direct(operator: Any) -> Any:
    """What `operator` calls: without a function of Python in between.

    torch 2.13: `OpOverload.__call__` is one, a fifth of the call of a small operator.
    """
    return getattr(operator, "_op", operator)


def draws(operator: Any) -> bool:
    """Whether `operator` draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def identity_of(generator: torch.Generator) -> int:
    """A number for the generator, its own as long as somebody has it.

    torch 2.13: an operator gets another Python object for it than the one that was made.
    """
    return int(generator._cdata)  # type: ignore[attr-defined]


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the memory of `tensor`, its own as long as a tensor has it.

    torch 2.13: there is no public name for the identity of a storage without its address, which
    tensors of no elements share.
    """
    return int(tensor.untyped_storage()._cdata)
