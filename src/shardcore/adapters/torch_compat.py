"""Every private torch name that shardcore touches, with the versions it is known in and why.

Known for torch 2.13.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from shardcore.domain.layout import ShardOrder
from shardcore.domain.mesh import Mesh

# torch 2.13: nests of operands are walked by a module without a public name.
tree_leaves = pytree.tree_leaves
tree_map_only = pytree.tree_map_only

# torch 2.13: operators that have no public name, as the dispatcher meets them.
ITEM = torch.ops.aten._local_scalar_dense.default
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


CTC_LOSS = (torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor)
UNIQUE = torch.ops.aten._unique2.default


def set_promotion(enabled: bool) -> bool:
    """Switch the promotion of plain tensors for this thread; gives what it was before.

    torch 2.13: the public `implicit_replication()` is not nestable, it leaves with False.
    """
    before: bool = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(enabled)
    return before


def ordered_placements(
    placements: tuple[Placement, ...], order: ShardOrder, mesh: Mesh
) -> tuple[Placement, ...]:
    """`placements` such that the dims in `order` are split in that order of axes.

    torch 2.13: an order other than that of the mesh axes is said by `_StridedShard`, which has
    no public constructor for it.
    """
    for dim, axes in order:
        entry = ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(map(mesh.axis_index, axes)))
        placements = DTensorSpec._convert_shard_order_to_StridedShard(
            (entry,), placements, cast(DeviceMesh, _Sizes(mesh))
        )
    return placements


def plain_placements(tensor: DTensor, mesh: Mesh) -> tuple[tuple[Placement, ...], ShardOrder]:
    """The placements of `tensor` without `_StridedShard`, and the order that it stood for."""
    placements, order = DTensorSpec._normalize_placements_into_shard_order(
        tuple(tensor.placements), tensor.device_mesh
    )
    named = tuple(
        (entry.tensor_dim, tuple(mesh.axis_names[i] for i in entry.mesh_dims)) for entry in order
    )
    return placements, named


class _Sizes:
    """What `_convert_shard_order_to_StridedShard` reads of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._shape = mesh.shape

    def size(self, axis: int) -> int:
        return self._shape[axis]


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


_TORCHS_HANDLERS: dict[Any, Handler] = dict(DTensor._op_dispatcher._custom_op_handlers)


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor makes of `operator`, called from the handler that stands before it.

    torch 2.13: the dispatcher is written in C++ and looks into `_custom_op_handlers` first; there
    is no way to tell it to go on.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator)
    if operator in _TORCHS_HANDLERS:
        handlers[operator] = _TORCHS_HANDLERS[operator]
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


def _reshapes(operator: Any) -> bool:
    return torch.Tag.inplace_view in operator.tags


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


def writes_first(operator: Any) -> bool:
    """Whether `operator` writes into its first operand."""
    arguments = operator._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


def base_of(tensor: DTensor) -> DTensor | None:
    """The sharded tensor that `tensor` is a view of; None if it is no view of one.

    torch 2.13: `_is_view` and `_base` are the only way to ask autograd.
    """
    base = tensor._base if tensor._is_view() else None
    return base if isinstance(base, DTensor) else None


def same_view(view: DTensor, base: torch.Tensor) -> torch.Tensor:
    """What `view` is of its base, of another base.

    torch 2.13: `_view_func` asks first whether both bases are of one size, which fails for a
    DTensor and a plain tensor.
    """
    result: torch.Tensor = view._view_func_unsafe(base)
    return result


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What this rank stores, without a word to autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local


class OperatorTable:
    """What DTensor does with an operator, changed while at least one scope asks for it.

    torch 2.13: `DTensor._op_dispatcher` has no public way to say what happens where an operator
    has no sharding rule (`_propagate_op_sharding_dispatch_slow_path` raises), nor to replace one
    whose result is wrong (`_custom_op_handlers`).

    Args:
        handlers: Operators that are run by these functions instead.
        on_fallback: Told of an operator and its operands when they are replicated for it.
    """

    def __init__(
        self, handlers: dict[Any, Handler], on_fallback: Callable[[Any, Any], None]
    ) -> None:
        self._handlers = handlers
        self._on_fallback = on_fallback
        self._users = 0

    def enter(self) -> None:
        """Put the changes in place, unless another scope has."""
        self._users += 1
        if self._users > 1:
            return
        if not is_known(torch.__version__):
            _warn_of_unknown(torch.__version__)
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher._custom_op_handlers.update(self._handlers)
        dispatcher._propagate_op_sharding_dispatch_slow_path = self._propagate
        dispatcher._try_replicate_spec_for_scalar_tensor = _promoted_spec
        for name in _CHATTY:
            logging.getLogger(name).addFilter(_is_no_advice)

    def leave(self) -> None:
        """Take the changes back when the last scope leaves."""
        self._users -= 1
        if self._users:
            return
        dispatcher: Any = DTensor._op_dispatcher
        for operator in self._handlers:
            del dispatcher._custom_op_handlers[operator]
        dispatcher._custom_op_handlers.update(_TORCHS_HANDLERS)
        del dispatcher._propagate_op_sharding_dispatch_slow_path
        del dispatcher._try_replicate_spec_for_scalar_tensor
        for name in _CHATTY:
            logging.getLogger(name).removeFilter(_is_no_advice)

    def _propagate(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], info: Any, cached: bool
    ) -> Any:
        dispatcher: Any = DTensor._op_dispatcher
        rule = type(dispatcher)._propagate_op_sharding_dispatch_slow_path
        settled = _settled_schema(operator, info.schema)
        if settled is not None:
            return _after_settling(settled)
        try:
            sharding = rule(dispatcher, operator, args, kwargs, info, cached)
        except (NotImplementedError, RuntimeError):
            replicated = _replicated_sharding(info)
            if replicated is None:
                raise
            self._on_fallback(operator, (args, kwargs))
            return replicated
        if _divides_integers(sharding, info.schema) or _is_distrusted(operator, info.schema):
            replicated = _replicated_sharding(info)
            if replicated is not None:
                self._on_fallback(operator, (args, kwargs))
                return replicated
        return _reshaping(sharding, info.schema)


def _settled_schema(operator: Any, schema: OpSchema) -> OpSchema | None:
    """`schema` with its pending operands reduced, if others are split over the same axes.

    torch 2.13: an elementwise operator on a batch-split activation and a pending mean is planned
    as a gather of the activation, as in a batch normalization.
    """
    if torch.Tag.pointwise not in operator.tags or schema.is_inplace_op():
        return None
    specs = [s for s in pytree.tree_leaves(schema.args_schema) if isinstance(s, DTensorSpec)]
    meet = any(
        any(p.is_partial() for p in along) and any(isinstance(p, Shard) for p in along)
        for along in zip(*(spec.placements for spec in specs), strict=True)
    )
    if not meet:
        return None

    def settle(leaf: Any) -> Any:
        if not isinstance(leaf, DTensorSpec):
            return leaf
        placements = tuple(Replicate() if p.is_partial() else p for p in leaf.placements)
        return DTensorSpec(leaf.mesh, placements, tensor_meta=leaf.tensor_meta)

    operands = pytree.tree_map(
        settle, schema.args_schema, is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    return OpSchema(schema.op, tuple(operands), schema.kwargs_schema, schema.schema_info)


def _after_settling(schema: OpSchema) -> OutputSharding:
    """The sharding of `schema`, whose operands have to be redistributed to be so."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    sharding = propagator.propagate_op_sharding_non_cached(schema)
    return OutputSharding(
        sharding.output_spec,
        sharding.redistribute_schema or schema,
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )


# What runs on parts without an element as well, beside the elementwise operators.
_RUNS_ON_NOTHING = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten._to_copy.default,
}


def _is_distrusted(operator: Any, schema: OpSchema) -> bool:
    """Whether to replicate first: of an unknown torch; or a rank with an empty part could die."""
    if operator in _RUNS_ON_NOTHING or torch.Tag.pointwise in operator.tags:
        return False
    if not is_known(torch.__version__):
        return True
    specs = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return any(isinstance(spec, DTensorSpec) and _has_empty_part(spec) for spec in specs)


def _has_empty_part(spec: DTensorSpec) -> bool:
    sizes = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            parts, size = spec.mesh.size(axis), sizes[placement.dim]
            chunk = -(-size // parts)
            if chunk * (parts - 1) >= size:
                return True
            # The smallest part counts: the last one.
            sizes[placement.dim] = size - chunk * (parts - 1)
    return False


@lru_cache(maxsize=1)
def is_known(version: str) -> bool:
    """Whether the operators of this torch have been through the matrix."""
    return version.startswith("2.13.")


@lru_cache(maxsize=1)
def _warn_of_unknown(version: str) -> None:
    logging.getLogger("shardcore.operators").warning(
        "torch %s is not known to shardcore, whose operators were checked on torch 2.13: all but "
        "elementwise ones are run on replicated operands, which is right and slow.",
        version,
    )


def _divides_integers(sharding: Any, schema: OpSchema) -> bool:
    """Whether integers would be made a pending sum, which torch 2.13 does by a division."""
    local = getattr(sharding, "redistribute_schema", None)
    if local is None:
        return False
    before, after = pytree.tree_leaves(schema.args_schema), pytree.tree_leaves(local.args_schema)
    return any(
        isinstance(old, DTensorSpec)
        and isinstance(new, DTensorSpec)
        and old.tensor_meta is not None
        and not old.tensor_meta.dtype.is_floating_point
        and not old.tensor_meta.dtype.is_complex
        and any(
            a.is_replicate() and type(b) is Partial
            for a, b in zip(old.placements, new.placements, strict=True)
        )
        for old, new in zip(before, after, strict=False)
    )


def _reshaping(sharding: Any, schema: OpSchema) -> Any:
    """A view of what this rank stores may be impossible where one of the whole is not.

    torch 2.13: a part is not always contiguous where the whole is, so that a view dies, even on
    some ranks only. As a reshape it copies there.
    """
    views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
    if schema.op not in views or not isinstance(sharding, OutputSharding):
        return sharding
    local = sharding.redistribute_schema or schema
    return OutputSharding(
        sharding.output_spec,
        OpSchema(torch.ops.aten.reshape.default, local.args_schema, local.kwargs_schema),
        needs_redistribute=True,
        use_val_from_redistribute_schema=sharding.use_val_from_redistribute_schema,
    )


def _replicated_sharding(info: Any) -> OutputSharding | None:
    """The sharding that replicates every operand; None where the operator cannot be run so."""
    schema = info.schema
    if schema.is_inplace_op() or schema.is_out_variant_op():
        return None
    if any(_is_split(value) for value in schema.kwargs_schema.values()):
        return None
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    try:
        meta = propagator._propagate_tensor_meta_non_cached(schema)
    except Exception:  # noqa: BLE001 - a fake run of any operator; whatever it raises, no shape
        return None

    def replicate(leaf: Any) -> Any:
        return _replicated_spec(info, leaf.tensor_meta) if isinstance(leaf, DTensorSpec) else leaf

    operands = pytree.tree_map(
        replicate, schema.args_schema, is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    if meta is None or isinstance(meta, TensorMeta):
        output: Any = _replicated_spec(info, meta)
    else:
        output = type(meta)(_replicated_spec(info, each) for each in meta)
    return OutputSharding(
        output,
        OpSchema(schema.op, tuple(operands), schema.kwargs_schema),
        needs_redistribute=True,
    )


def _replicated_spec(info: Any, meta: TensorMeta | None) -> DTensorSpec | None:
    if meta is None:  # an output that is no tensor
        return None
    mesh = info.compute_mesh
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


def _promoted_spec(_operator: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """A plain tensor counts as replicated. torch's own warns of those of shape (1,)."""
    meta = TensorMeta(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


# torch 2.13: advice that a user of Keras can do nothing about, given once by every rank.
_CHATTY = {
    "torch.distributed.tensor._collective_utils": "CPU process group does not support alltoall",
    "torch.distributed.tensor._redistribute": "While redistributing from",
}


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_CHATTY.get(record.name, "\0"))


def _is_split(value: Any) -> bool:
    return isinstance(value, DTensorSpec) and not value.is_replicated()


def store_for_thread(prefix: str) -> Store:
    """A connection of its own to the store of the default group, its keys under `prefix`.

    torch 1.13 to 2.13: `distributed_c10d._get_default_store` has no public counterpart, and a
    store of our own would need a second address. A wait on a shared connection blocks every
    other thread; `clone` makes another.
    """
    store: Any = _get_default_store()  # the stubs of torch do not know `clone`
    return PrefixStore(prefix, store.clone())


class CollectiveListener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `listen` of every collective of tensors that this thread starts.

    torch 2.13: `torch.distributed.tensor.debug.CommDebugMode` counts them too, but its module
    hooks fail on Keras layers, which call each other outside `torch.nn.Module.__call__`; and
    `TorchDispatchMode` and the operators of functional collectives have no public names.

    Args:
        listen: Called with the name of the collective ("all_reduce") and this rank's operand.
    """

    def __init__(self, listen: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen = listen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: what it makes of the operator comes here next
        if func.namespace in ("_c10d_functional", "c10d"):
            name = COLLECTIVES.get(func._schema.name.partition("::")[2])
            if name is not None:
                tensors = (a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor))
                self._listen(name, next(tensors))
        return func(*args, **(kwargs or {}))


# torch 2.13: the operators that move tensors, with the name of the collective.
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}
