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
_warned: set[str] = set()


def distribute(data: Any, session: Session) -> Any:
    """A batch, any nest of arrays and tensors, as the global batch.

    Under `auto_shard_dataset=True` every process gives the same whole batch and keeps its rows;
    otherwise each gives its own rows, and the global batch is all of them in the order of the
    batch axis. Nothing but row counts is communicated, unless the rows that the processes give
    do not fall as `torch.chunk` would cut them.
    """
    split = _take_rows if session.distribution.auto_shard_dataset else _join_rows
    return seams.map_leaves(lambda leaf: split(_tensor(leaf), session), data)


def _tensor(leaf: Any) -> Any:
    """NumPy arrays as tensors; what torch has no tensor for stays as it is."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        # A copy: Keras multiplies sample weights by the mask in place.
        return torch.tensor(leaf, device=seams.torch_device())
    return leaf


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


def _own_rows_are_sharded(rows: Any) -> LayoutError:
    return LayoutError(
        f"With auto_shard_dataset=False each process gives its own rows, but a batch came as a "
        f"sharded tensor of shape {tuple(rows.shape)}, which is one of all processes: compute it "
        "without the model's layers or variables, or set auto_shard_dataset=True."
    )


@attrs.frozen
class _Rows:
    """What one process tells of its rows."""

    position: int
    shape: tuple[int, ...]
    dtype: str


def _join_rows(rows: Any, session: Session) -> Any:
    if not isinstance(rows, torch.Tensor) or rows.ndim == 0:
        return rows
    if session.strategy.owns(rows):
        raise _own_rows_are_sharded(rows)
    given = session.processes.gather(
        _Rows(session.world.position, tuple(rows.shape), str(rows.dtype))
    )
    counts = _row_counts(given, session)
    shape = (sum(counts), *rows.shape[1:])
    layout = session.batch_layout(rows.ndim)
    if _fall_as_chunks(counts, shape, layout, session):
        return session.strategy.join(rows, layout, shape)
    return _take_rows(_gather_rows(rows, counts, session), session)


def _row_counts(given: list[_Rows], session: Session) -> list[int]:
    """The rows of each coordinate of the batch axis.

    Raises:
        RankMismatchError: If processes that differ only in another axis give unequal shapes, or
            rows do not fit together.
    """
    axis = session.mesh.axis_index(session.batch_axis)
    counts: dict[int, int] = {}
    for process, rows in enumerate(given):
        if (rows.shape[1:], rows.dtype) != (given[0].shape[1:], given[0].dtype):
            raise RankMismatchError(
                f"Process {process} gave rows of shape {rows.shape} and {rows.dtype}, process 0 "
                f"of shape {given[0].shape} and {given[0].dtype}: all but the number of rows must "
                "be equal."
            )
        at = session.mesh.coordinate(rows.position)[axis]
        if counts.setdefault(at, rows.shape[0]) != rows.shape[0]:
            raise RankMismatchError(
                f"Process {process} gave {rows.shape[0]} rows, another at the same place {at} of "
                f"axis {session.batch_axis!r} gave {counts[at]}. Processes that differ only in "
                "other axes compute on the same rows: with auto_shard_dataset=False, give those "
                "of distribution.data_shard_id."
            )
    return [counts[at] for at in range(session.mesh.axis_size(session.batch_axis))]


def _fall_as_chunks(
    counts: list[int], shape: tuple[int, ...], layout: Layout, session: Session
) -> bool:
    axis = session.mesh.axis_index(session.batch_axis)
    chunks = {
        session.mesh.coordinate(rank)[axis]: layout.local_shape(shape, rank)[0]
        for rank in range(session.mesh.size)
    }
    return all(chunks[at] == count for at, count in enumerate(counts)) and 0 not in counts


def _gather_rows(rows: torch.Tensor, counts: list[int], session: Session) -> torch.Tensor:
    """All the rows, on every process: ranks brought unequal numbers of them."""
    if "unequal" not in _warned:
        _warned.add("unequal")
        logger.warning(
            "The processes gave %s rows along axis %r: the batch is gathered to be split evenly, "
            "at every such step. Give equal numbers of rows to avoid it.",
            counts,
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
