"""Global batches, sharded over the batch axis, from the arrays of each process (ADR 5).

The patch here is the mask of a loss, by which Keras multiplies sample weights in place. On one
device this changes a tensor of weights: the metrics of the step see the product. It does not change
an array, of which Keras makes a new tensor at each use. shardcore keeps both, but copies the user's
tensor first, since a rank would change its own rows only.
"""

import weakref
from collections.abc import Sequence
from typing import Any, TypeGuard

import attrs
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.data.transfer import rows_device, to_device
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.errors import LayoutError, RankMismatchError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.spec import named_axes
from shardcore.reporting.logs import log_of

logger = log_of("batches")


def distribute(data: object, session: Session) -> Any:
    """Shards a batch, any nest of arrays and tensors, over the batch axes.

    With `auto_shard_dataset=True` every process has the same global batch and keeps its rows.
    Otherwise each has its own rows, which form the global batch in the order of the batch axis.
    Only row counts are communicated, unless the processes have other numbers of rows than
    `torch.chunk` would give them.
    """
    if not session.distribution.auto_shard_dataset:
        return join_own_rows(data, session)
    return take_own_rows(data, session)


def take_own_rows(data: object, session: Session) -> Any:
    """Shards a batch of which each process has all rows: it keeps its own."""
    tensors = keras_private.map_leaves(as_tensor, data)
    return keras_private.map_leaves(lambda leaf: _take_rows(leaf, session), tensors)


def join_own_rows(data: object, session: Session) -> Any:
    """Makes the global batch of the rows of all processes, each of which has its own."""
    tensors = keras_private.map_leaves(as_tensor, data)
    return _join_all_rows(keras_private.map_tensors(to_device, tensors), session)


def as_tensor(leaf: object) -> Any:
    """Converts arrays of NumPy, pandas, ... to tensors; other objects stay."""
    if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__array__"):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufc":
        return leaf
    # A copy: Keras multiplies sample weights by the mask in place.
    return torch.tensor(array, device=rows_device())


def own_rows(count: int, session: Session) -> slice | None:
    """Finds the part of `count` rows that this rank keeps; None if it keeps all."""
    layout = _rows_layout((count,), session)
    return None if layout.is_replicated else layout.slices((count,), session.world.position)[0]


def join_rows(rows: torch.Tensor, count: int, session: Session) -> Any:
    """Makes a sharded batch of `count` rows, of which this rank has `rows`."""
    layout, shape = session.batch_layout(rows.ndim), (count, *rows.shape[1:])
    return session.from_local(to_device(rows), layout, shape)


def _take_rows(batch: object, session: Session) -> Any:
    if not isinstance(batch, torch.Tensor) or batch.ndim == 0:
        return batch
    if session.strategy.owns(batch):  # read so, or computed by a layer in the user's pipeline
        return session.strategy.redistribute(batch, _rows_layout(tuple(batch.shape), session))
    shape = tuple(batch.shape)
    layout = _rows_layout(shape, session)
    rows = batch[layout.slices(shape, session.world.position)]
    return session.from_local(to_device(rows), layout, shape)


def _rows_layout(shape: tuple[int, ...], session: Session) -> Layout:
    """Shards rows over the batch axes; replicates them if there are too few.

    A rank without a row cannot run every operator, and a few rows cost little (ADR 5).
    """
    if shape[0] < session.batch_shards:
        return Layout.replicated(session.mesh, len(shape))
    return session.batch_layout(len(shape))


@attrs.frozen
class _Rows:
    """The rows of one process."""

    position: int
    shape: tuple[int, ...]
    dtype: str


def _join_all_rows(batch: object, session: Session) -> Any:
    """Joins the rows of all processes, which exchange the shapes of all arrays at once."""
    leaves = [leaf for leaf in keras_private.leaves(batch) if leaf is not None]
    everyone = session.processes.gather([_rows_of(leaf, session) for leaf in leaves])
    for process, theirs in enumerate(everyone):
        if len(theirs) != len(everyone[0]):
            raise RankMismatchError(
                f"Process {process} gave a batch of {len(theirs)} arrays, process 0 of "
                f"{len(everyone[0])}: inputs, targets and sample weights, each on all or on none.",
                rank=process,
            )
    gathered = zip(*everyone, strict=True)
    return keras_private.map_leaves(lambda rows: _join_rows(rows, next(gathered), session), batch)


def _rows_of(rows: Any, session: Session) -> _Rows:
    """Describes one leaf of a batch; a scalar, or another object, has no shape."""
    if session.strategy.owns(rows):
        raise LayoutError(
            "With auto_shard_dataset=False each process gives its own rows, but a batch came as a "
            f"sharded tensor of shape {tuple(rows.shape)}, which is one of all processes: compute "
            "it without the model's layers or variables, or set auto_shard_dataset=True."
        )
    if isinstance(rows, torch.Tensor):
        return _Rows(session.world.position, tuple(rows.shape), str(rows.dtype))
    if len(getattr(rows, "shape", ())) > 0:
        raise LayoutError(
            "With auto_shard_dataset=False each process gives its own rows, but torch has no "
            f"tensor for those of shape {tuple(rows.shape)} and dtype "
            f"{getattr(rows, 'dtype', type(rows))}: give numbers, or set auto_shard_dataset=True."
        )
    return _Rows(session.world.position, (), type(rows).__name__)


def _join_rows(rows: Any, gathered: tuple[_Rows, ...], session: Session) -> Any:
    _check_alike(gathered)
    if not gathered[0].shape:
        return rows
    counts = _row_counts(gathered, session)
    shape = (sum(counts), *rows.shape[1:])
    layout = session.batch_layout(rows.ndim)
    if 0 not in counts and layout.chunk_sizes(0, shape[0]) == counts:
        return session.from_local(rows, layout, shape)
    return _take_rows(_gather_rows(rows, counts, session), session)


def _check_alike(gathered: tuple[_Rows, ...]) -> None:
    """Refuses rows of a process that differ in more than their number, or are missing."""
    for process, rows in enumerate(gathered):
        kinds = [(len(array.shape), array.shape[1:], array.dtype) for array in (rows, gathered[0])]
        if kinds[0] != kinds[1]:
            raise RankMismatchError(
                f"Process {process} gave rows of shape {rows.shape} and {rows.dtype}, process 0 "
                f"of shape {gathered[0].shape} and {gathered[0].dtype}: all but the number "
                "of rows must be equal.",
                rank=process,
            )


def _row_counts(gathered: tuple[_Rows, ...], session: Session) -> tuple[int, ...]:
    """Counts the rows of each place along the batch axes; its processes must agree."""
    axes = named_axes(session.batch_axes)
    counts: dict[int, int] = {}
    for process, rows in enumerate(gathered):
        at = session.mesh.position_along(session.batch_axes, rows.position)
        if counts.setdefault(at, rows.shape[0]) != rows.shape[0]:
            raise RankMismatchError(
                f"Process {process} gave {rows.shape[0]} rows, another at the same place {at} of "
                f"{axes} gave {counts[at]}. Processes that differ only in other axes compute on "
                "the same rows: with auto_shard_dataset=False, give those of "
                "distribution.data_shard_id.",
                rank=process,
            )
    return tuple(counts[at] for at in range(session.batch_shards))


def _gather_rows(rows: torch.Tensor, counts: tuple[int, ...], session: Session) -> torch.Tensor:
    """Gathers all rows on every process, since ranks have unequal numbers of them."""
    if "unequal rows" not in session.warnings:
        session.warnings.add("unequal rows")
        logger.warning(
            "The processes gave %s rows along %s: the batch is all-gathered to be sharded evenly, "
            "at every such step. Give equal numbers of rows to avoid it.",
            list(counts),
            named_axes(session.batch_axes),
        )
    most = max(counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    shape = (most * len(counts), *rows.shape[1:])
    gathered = session.strategy.full_tensor(
        session.from_local(padded, session.batch_layout(rows.ndim), shape)
    )
    parts = gathered.reshape(len(counts), most, *rows.shape[1:])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def distribute_step(data: list[object], session: Session) -> list[Any]:
    """Shards the batches of a step, with sample weights that it may write to."""
    distributed: list[Any] = distribute([_own(batch) for batch in data], session)
    _note_arrays(data, distributed, session.arrays)
    return distributed


def step_on_one_device(data: list[object], sessions: Sessions) -> list[Any]:
    """Converts the batches of a step to tensors."""
    tensors = keras_private.map_leaves(as_tensor, data)
    batches: list[Any] = keras_private.map_tensors(to_device, tensors)
    _note_arrays(data, batches, sessions.arrays)
    return batches


def _note_arrays(
    data: list[object], batches: list[Any], arrays: "weakref.WeakSet[torch.UntypedStorage]"
) -> None:
    """Notes in `arrays` the memory of sample weights that were arrays in `data`."""
    for before, after in zip(data, batches, strict=True):
        if _has_weights(before):
            weights = zip(
                keras_private.leaves(before[2]), keras_private.leaves(after[2]), strict=True
            )
            for array, tensor in weights:
                if isinstance(tensor, torch.Tensor) and not isinstance(array, torch.Tensor):
                    arrays.add(_memory(tensor))


def _own(batch: object) -> Any:
    if not _has_weights(batch):
        return batch
    x, y, weights = batch
    return x, y, keras_private.map_tensors(torch.clone, weights)


def _has_weights(batch: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(batch, tuple | list) and len(batch) == 3


def array_weights(data: list[object]) -> tuple[bool, ...]:
    """Tells for each sample weight of a step whether it is an array: `mask` must copy that."""
    weights = [keras_private.leaves(batch[2]) for batch in data if _has_weights(batch)]
    return tuple(not isinstance(leaf, torch.Tensor) for leaves in weights for leaf in leaves)


@replaces(
    "keras.src.losses.loss:apply_mask",
    reason="Multiplies sample weights in place, which an array on one device does not see.",
)
def mask(
    sessions: Sessions, original: Original, sample_weight: Any, *args: object, **kwargs: object
) -> Any:
    """Replaces `apply_mask`, so that it does not change weights that were an array."""
    session = sessions.current()
    if _was_array(sample_weight, sessions.arrays if session is None else session.arrays):
        sample_weight = sample_weight.clone()
    return original(sample_weight, *args, **kwargs)


def _was_array(weights: object, arrays: "weakref.WeakSet[torch.UntypedStorage]") -> bool:
    """Looks for the tensor of a user's array: `weights`, or the one of which they are a view.

    Keras passes that tensor, or a copy in another dtype, which may be written to. A custom loss may
    pass a view, which has separate memory if a sharded dim is viewed.
    """
    tensors = (weights, getattr(weights, "viewed_tensor", None))
    return any(isinstance(tensor, torch.Tensor) and _memory(tensor) in arrays for tensor in tensors)


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    memory: torch.UntypedStorage = part.untyped_storage()
    return memory
