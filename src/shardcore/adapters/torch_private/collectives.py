"""Collectives: the operators that start them and wait for them.

torch 2.13: `torch.distributed` has operators for collectives, which a trace of a step contains
like any other, but no public names for them. Its public functions keep a `Work` object, which no
trace contains. `wait` must be called for each result.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters.torch_private.operators import Operator
from shardcore.adapters.torch_private.trees import Args, tree_leaves

P = ParamSpec("P")


def _of_real_parts(
    move: Callable[Concatenate[torch.Tensor, P], torch.Tensor],
) -> Callable[Concatenate[torch.Tensor, P], torch.Tensor]:
    """Wraps `move` to take complex numbers, as pairs of real ones: gloo sends no others."""

    @wraps(move)
    def run(value: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        if not value.is_complex():
            return move(value, *args, **kwargs)
        pairs = torch.view_as_real(value.resolve_conj().contiguous())
        return torch.view_as_complex(move(pairs, *args, **kwargs))

    return run


# The dtypes that neither gloo nor NCCL moves, each with one that both reduce: sums, cast back, wrap
# around as on one device. torch has no maximum of the unsigned ones, and no reduction of float8.
_REDUCED_AS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}


def _in_wider_type(
    reduce: Callable[Concatenate[torch.Tensor, str, P], torch.Tensor],
) -> Callable[Concatenate[torch.Tensor, str, P], torch.Tensor]:
    """Wraps `reduce` to take dtypes that no backend reduces, in a wider one."""

    @wraps(reduce)
    def run(value: torch.Tensor, op: str, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        dtype, wider = value.dtype, _REDUCED_AS.get(value.dtype)
        if wider is None:
            return reduce(value, op, *args, **kwargs)
        return wait(reduce(value.to(wider), op, *args, **kwargs)).to(dtype)

    return run


def _to_movable_dtype(value: torch.Tensor) -> torch.Tensor:
    """Views a dtype that no backend moves as bytes, along the last dim."""
    return value.contiguous().view(torch.uint8) if value.dtype in _REDUCED_AS else value


@_of_real_parts
@_in_wider_type
def all_reduce(value: torch.Tensor, op: str, group: "dist.ProcessGroup") -> torch.Tensor:
    """Starts the reduction of `value` by `op`: "sum", "max", "min" or "product"."""
    reduced: torch.Tensor = torch.ops._c10d_functional.all_reduce(value, op, group.group_name)
    return reduced


@_of_real_parts
def all_gather(value: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
    """Joins the values of all ranks of `group`, of one shape, along their first dim.

    torch 2.10 to 2.15: gloo reads tensors of a GPU as if they were in the memory of the host, and
    the process crashes (pytorch issue 152645). Only in an all-gather: others copy to the host.
    """
    dtype, value = value.dtype, _to_movable_dtype(value)
    by_host = value.device.type != "cpu" and runs_on_gloo(group.group_name, value.device)
    sent = value.cpu() if by_host else value.contiguous()
    gathered: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(
        sent, group.size(), group.group_name
    )
    gathered = wait(gathered).to(value.device) if by_host else gathered
    return gathered.view(dtype) if gathered.dtype != dtype else gathered


@cache
def gather_safely() -> "torch.library.Library":
    """Makes torch's all-gather of tensors on a CPU safe where several are under way.

    torch 2.13 to 2.15: gloo runs this operator as an all-gather of a list of tensors. Two of those
    at a time corrupt the heap: in a loop of them the process dies within a minute (seen with torch
    2.13.0 and 2.14.1). The operator with `out=` is an all-gather of one tensor, and is safe.

    Returns:
        The registration, which lasts as long as the process.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_gather_into_tensor", _gather_into_new_memory, "CPU")  # type: ignore[no-untyped-call]
    return library


@_of_real_parts
def _gather_into_new_memory(value: torch.Tensor, size: int, group: str) -> torch.Tensor:
    memory = value.new_empty((size * value.shape[0], *value.shape[1:]))
    gathered: torch.Tensor = gather_into()(value, size, group, out=memory)
    return gathered


@_of_real_parts
@_in_wider_type
def reduce_scatter(value: torch.Tensor, op: str, group: "dist.ProcessGroup") -> torch.Tensor:
    """Starts a reduction of which this rank gets its part, along the first dim."""
    part: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(
        value.contiguous(), op, group.size(), group.group_name
    )
    return part


@_of_real_parts
def all_to_all(
    value: torch.Tensor, received: list[int], sent: list[int], group: "dist.ProcessGroup"
) -> torch.Tensor:
    """Joins the rows that all ranks send to this one, along the first dim.

    `value` has the rows that this rank sends, those for the first rank first; `received` and `sent`
    have the numbers of rows from and for each rank.
    """
    dtype, movable = value.dtype, _to_movable_dtype(value)
    if movable.dtype != dtype and value.ndim == 1:  # its rows are bytes
        received, sent = ([rows * dtype.itemsize for rows in counts] for counts in (received, sent))
    exchanged: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        movable.contiguous(), received, sent, group.group_name
    )
    return exchanged.view(dtype) if exchanged.dtype != dtype else exchanged


def wait(value: torch.Tensor) -> torch.Tensor:
    """Waits for the collective that computes `value`, and returns `value`."""
    ready: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return ready


@attrs.frozen(eq=False)
class CollectiveCall:
    """A collective that this rank is about to start."""

    name: str  # its name: "all_reduce"
    operands: tuple[torch.Tensor, ...]  # this rank's operands
    group: Any  # the process group, in any form in which torch passes it

    @property
    def operand_bytes(self) -> int:
        """The bytes of the operands."""
        return sum(operand.nbytes for operand in self.operands)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that take part, in the order of the group.

        torch 2.13: operators take a group by its name, which has no public look-up, or boxed.
        """
        group = self.group
        if isinstance(group, str):
            group = _group_named(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        return tuple(dist.get_process_group_ranks(group))


def collective_call(operator: Operator, args: Args) -> CollectiveCall | None:
    """Reads name, operands and group by the schema; None for other operators."""
    name = _collective_of(operator._schema.name)
    names = _names_of_operands(operator) if name else []
    groups = [args[at] for at, argument in enumerate(names) if argument in _GROUPS]
    if not groups:
        return None
    tensors = tree_leaves(collective_operands(operator, args))
    sent = (leaf for leaf in tensors if isinstance(leaf, torch.Tensor))
    return CollectiveCall(name, tuple(sent), groups[0])


def collective_operands(operator: Operator, args: Args) -> Any:
    """Finds the operands that a collective sends: not the memory for its result."""
    names = _names_of_operands(operator)
    return args[next(at for at, argument in enumerate(names) if argument in _OPERANDS)]


def _names_of_operands(operator: Operator) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def is_collective(operator: object) -> bool:
    """Counts starts alone, not the waits; and only functional collectives."""
    return bool(collective_name(operator))


def collective_name(operator: object) -> str:
    """Finds "all_gather", for instance; empty if `operator` starts no functional collective."""
    name = _name(operator)
    return _collective_of(name) if name.startswith("_c10d_functional::") else ""


def _group_named(name: str) -> Any:
    from torch.distributed import distributed_c10d  # a torch may be without

    named: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return named(name)


def runs_on_gloo(group: str, device: torch.device) -> bool:
    """Looks up the backend by which the group of this name moves tensors on `device`."""
    is_cpu = device.type == "cpu"
    return is_cpu or f"{device.type}:gloo" in str(dist.get_backend_config(_group_named(group)))


def gather() -> Any:
    """Looks up the all-gather when it is needed: a torch may lack `torch.distributed`."""
    return torch.ops._c10d_functional.all_gather_into_tensor.default


def gather_into() -> Any:
    """Looks up the all-gather into given memory, `out`."""
    return torch.ops._c10d_functional.all_gather_into_tensor_out.default


def wait_for() -> Any:
    """Looks up the operator that waits for a collective and returns its result."""
    return torch.ops._c10d_functional.wait_tensor.default


def all_reduce_out_of_place() -> Any:
    """Looks up the all-reduce into new memory."""
    return torch.ops._c10d_functional.all_reduce.default


def all_reduce_in_place() -> Any:
    """Looks up the all-reduce into the memory of its operand."""
    return torch.ops._c10d_functional.all_reduce_.default


def is_all_reduce(operator: object) -> bool:
    """Leaves out the all-reduce in place, `all_reduce_`."""
    return _name(operator) == "_c10d_functional::all_reduce"


def is_wait(operator: object) -> bool:
    """Leaves out `wait_tensors` of torch 2.15, which is not used here."""
    return _name(operator) == "_c10d_functional::wait_tensor"


def is_autograd_wrapper(operator: Operator) -> bool:
    """Finds the operator that wraps the result of a collective for autograd.

    torch 2.13: of the operators of functional collectives it alone takes no group and waits for
    none; torch 2.15 has `wait_tensors` too.
    """
    name = _name(operator)
    if not name.startswith("_c10d_functional::") or "::wait" in name:
        return False
    return not any(argument.name.startswith("group") for argument in operator._schema.arguments)


def _name(operator: object) -> str:
    # By name, since a torch without torch.distributed has no such operators.
    schema = getattr(operator, "_schema", None)
    return "" if schema is None else str(schema.name)


def is_of_collectives(operator: object) -> bool:
    """Counts starts and waits, of `torch.distributed` and of its functional collectives."""
    return getattr(operator, "namespace", "") in ("_c10d_functional", "c10d")


@cache
def _collective_of(name: str) -> str:
    """Finds "all_reduce" for "c10d::allreduce_", and so on; else ""."""
    plain = name.partition("::")[2].replace("_", "")
    return next(
        (collective for collective in _COLLECTIVES if collective.replace("_", "") in plain), ""
    )


# torch 2.13: the first parts of the names of operators that move tensors.
_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")

# torch 2.13: the names of the operands, and of the group, in the operators' schemas.
_OPERANDS = {"input", "inputs", "input_list", "input_tensor", "input_tensors", "tensor", "tensors"}
_GROUPS = {"group_name", "process_group"}
