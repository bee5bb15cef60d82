"""From what a process was given to the global batch, split over the batch axis."""

import logging
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.binding import seams
from shardcore.binding.session import Session
from shardcore.domain.errors import LayoutError, RankMismatchError
from shardcore.domain.layout import Layout

logger = logging.getLogger("shardcore.batches")


def distribute(data: Any, session: Session) -> Any:
    """A batch, any nest of arrays and tensors, as the global batch.

    Under `auto_shard_dataset=True` every process gives the same whole batch and keeps its rows;
    otherwise each gives its own rows, and the global batch is all of them in the order of the
    batch axis. Nothing but row counts is communicated, unless the rows that the processes give
    do not fall as `torch.chunk` would cut them.
    """
    tensors = seams.map_leaves(as_tensor, data)
    if session.distribution.auto_shard_dataset:
        return seams.map_leaves(lambda leaf: _take_rows(leaf, session), tensors)
    return _join_all_rows(tensors, session)


def as_tensor(leaf: Any) -> Any:
    """Arrays of NumPy, pandas, ... as tensors; what torch has no tensor for stays as it is."""
    if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "__array__"):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufc":
        return leaf
    # A copy: Keras multiplies sample weights by the mask in place.
    return torch.tensor(array, device=seams.torch_device())


def own_rows(count: int, session: Session) -> slice | None:
    """Which of `count` rows this rank keeps; None where it keeps all of them."""
    layout = _rows_layout((count,), session)
    return None if layout.is_replicated else layout.slices((count,), session.world.position)[0]


def join_rows(rows: torch.Tensor, count: int, session: Session) -> Any:
    """This rank's own `rows` as a part of a batch of `count`."""
    return session.strategy.join(rows, session.batch_layout(rows.ndim), (count, *rows.shape[1:]))


def _take_rows(batch: Any, session: Session) -> Any:
    if not isinstance(batch, torch.Tensor) or batch.ndim == 0:
        return batch
    if session.strategy.owns(batch):  # read so, or computed by a layer of the user's pipeline
        return session.strategy.activation(batch, _rows_layout(tuple(batch.shape), session))
    shape = tuple(batch.shape)
    layout = _rows_layout(shape, session)
    rows = batch[layout.slices(shape, session.world.position)]
    return session.strategy.join(rows, layout, shape)


def _rows_layout(shape: tuple[int, ...], session: Session) -> Layout:
    """Rows split over the batch axis; whole where there are fewer rows than ranks.

    A rank without a row cannot run every operator, and a few rows cost no rank much.
    """
    if shape[0] < session.mesh.axis_size(session.batch_axis):
        return Layout.replicated(session.mesh, len(shape))
    return session.batch_layout(len(shape))


@attrs.frozen
class _Rows:
    """The rows that one process gives."""

    position: int
    shape: tuple[int, ...]
    dtype: str


def _join_all_rows(batch: Any, session: Session) -> Any:
    """The rows of all processes, which exchange the shapes of the whole batch at once."""
    leaves = [leaf for leaf in seams.leaves(batch) if leaf is not None]
    everyone = session.processes.gather([_rows_of(leaf, session) for leaf in leaves])
    for process, theirs in enumerate(everyone):
        if len(theirs) != len(everyone[0]):
            raise RankMismatchError(
                f"Process {process} gave a batch of {len(theirs)} arrays, process 0 of "
                f"{len(everyone[0])}: inputs, targets and sample weights, each on all or on none."
            )
    given = zip(*everyone, strict=True)
    return seams.map_leaves(lambda rows: _join_rows(rows, next(given), session), batch)


def _rows_of(rows: Any, session: Session) -> _Rows:
    """Describes one leaf of a batch; a scalar, or what is no tensor, has no shape."""
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


def _join_rows(rows: Any, given: tuple[_Rows, ...], session: Session) -> Any:
    _check_alike(given)
    if not given[0].shape:
        return rows
    counts = _row_counts(given, session)
    shape = (sum(counts), *rows.shape[1:])
    layout = session.batch_layout(rows.ndim)
    if 0 not in counts and layout.chunk_sizes(0, shape[0]) == counts:
        return session.strategy.join(rows, layout, shape)
    return _take_rows(_gather_rows(rows, counts, session), session)


def _check_alike(given: tuple[_Rows, ...]) -> None:
    """Rows differ in number only.

    Raises:
        RankMismatchError: If they differ in more, or are rows on some processes only.
    """
    for process, rows in enumerate(given):
        kinds = [(len(each.shape), each.shape[1:], each.dtype) for each in (rows, given[0])]
        if kinds[0] != kinds[1]:
            raise RankMismatchError(
                f"Process {process} gave rows of shape {rows.shape} and {rows.dtype}, process 0 "
                f"of shape {given[0].shape} and {given[0].dtype}: all but the number of rows must "
                "be equal."
            )


def _row_counts(given: tuple[_Rows, ...], session: Session) -> tuple[int, ...]:
    """The rows of each coordinate of the batch axis.

    Raises:
        RankMismatchError: If processes that differ only in another axis give unequal numbers.
    """
    axis = session.mesh.axis_index(session.batch_axis)
    counts: dict[int, int] = {}
    for process, rows in enumerate(given):
        at = session.mesh.coordinate(rows.position)[axis]
        if counts.setdefault(at, rows.shape[0]) != rows.shape[0]:
            raise RankMismatchError(
                f"Process {process} gave {rows.shape[0]} rows, another at the same place {at} of "
                f"axis {session.batch_axis!r} gave {counts[at]}. Processes that differ only in "
                "other axes compute on the same rows: with auto_shard_dataset=False, give those "
                "of distribution.data_shard_id."
            )
    return tuple(counts[at] for at in range(session.mesh.axis_size(session.batch_axis)))


def _gather_rows(rows: torch.Tensor, counts: tuple[int, ...], session: Session) -> torch.Tensor:
    """All the rows, on every process: ranks brought unequal numbers of them."""
    if "unequal rows" not in session.warnings:
        session.warnings.add("unequal rows")
        logger.warning(
            "The processes gave %s rows along axis %r: the batch is gathered to be split evenly, "
            "at every such step. Give equal numbers of rows to avoid it.",
            list(counts),
            session.batch_axis,
        )
    most = max(counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    shape = (most * len(counts), *rows.shape[1:])
    gathered = session.strategy.whole(
        session.strategy.join(padded, session.batch_layout(rows.ndim), shape)
    )
    parts = gathered.reshape(len(counts), most, *rows.shape[1:])
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
