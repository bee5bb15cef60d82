"""Patches: the data adapters, which read only this rank's rows of arrays.

Keras refuses NumPy arrays, generators and loaders in several processes, and shards a
`tf.data.Dataset` itself. shardcore shards every batch at the step instead, so the adapters see no
distribution.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, count
from typing import Any

import attrs
import torch
from torch.utils.data import DistributedSampler

from shardcore.binding import keras_private
from shardcore.binding.data import batches
from shardcore.binding.data.transfer import Transfer, on_host, stream_of_copies
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session
from shardcore.binding.trainer_run import Drawn
from shardcore.binding.types import Original
from shardcore.domain.errors import RankMismatchError
from shardcore.domain.layouts.spec import named_axes


@replaces(
    "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter.get_torch_dataloader",
    reason="Reads every row of a batch; a rank needs its own.",
)
def array_loader(session: Session, original: Original, adapter: keras_private.DataAdapter) -> Any:
    """Replaces `ArrayDataAdapter.get_torch_dataloader` to read this rank's rows of each batch.

    Every rank draws the order of all rows, from one seed.
    """
    loader = original(adapter)
    if session.batch_shards == 1 or not session.distribution.auto_shard_dataset:
        return loader
    return torch.utils.data.DataLoader(
        _OwnRows(loader.dataset, session),
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
    )


@attrs.frozen
class _OwnRows(torch.utils.data.Dataset[Any]):
    """A dataset of arrays that reads this rank's rows of a batch, as a part of the global batch."""

    source: Any
    session: Session

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: list[int]) -> Any:
        rows = batches.own_rows(len(indices), self.session)
        if rows is None:
            return self.source.__getitems__(indices)

        @cache
        def full_batches() -> list[Any]:
            return keras_private.leaves(self.source.__getitems__(indices))

        numbers = count()

        def join(part: torch.Tensor) -> Any:
            number = next(numbers)
            joined = batches.join_rows(part, len(indices), self.session)
            # The first step compares the full batch of all ranks, so it is read once.
            joined._shardcore_content = lambda: full_batches()[number]
            return joined

        return keras_private.map_leaves(join, self.source.__getitems__(indices[rows]))


@attrs.define
class RowsAhead:
    """Draws a batch before its step (ADR 58).

    Args:
        adapter: What the batches come from.
        distribute: Returns a batch as its step takes it.
        stream: Where it is copied to a GPU; None on a host.
    """

    adapter: keras_private.DataAdapter
    distribute: Callable[[object], Any]
    stream: torch.cuda.Stream | None = attrs.field(factory=stream_of_copies)
    _last: Transfer | None = attrs.field(default=None, init=False)

    def __call__(self, batches_of_adapter: Iterator[object]) -> Drawn:
        """Draws the next batch; on a GPU its rows are copied beside the kernels that run."""
        if self.stream is None:
            batch = next(batches_of_adapter)
            rows = self.distribute(batch)
            return Drawn(batch, lambda: rows)
        if self._last is not None:
            self._last.finish()  # a generator may fill the same pinned memory again
        self._last = to_gpu = Transfer(self.stream)
        if keras_private.arrays_of(self.adapter) is None:  # its code may use the GPU
            batch = next(batches_of_adapter)
            if any(map(_is_on_gpu, keras_private.leaves(batch))):
                return Drawn(batch, lambda: self.distribute(batch))
            with to_gpu.open():
                rows = self.distribute(batch)
        else:
            with to_gpu.open():
                with on_host():
                    batch = next(batches_of_adapter)
                rows = self.distribute(batch)

        def wait_for_copies() -> Any:
            to_gpu.wait(rows)
            return rows

        return Drawn(batch, wait_for_copies)


def _is_on_gpu(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"


def epoch_facts(adapter: keras_private.DataAdapter, session: Session) -> rank_consistency.Facts:
    """Lists what of the arrays must be equal on all ranks before an epoch."""
    arrays = keras_private.arrays_of(adapter)
    if arrays is None or not session.distribution.auto_shard_dataset:
        return {}
    return {"batch size": str(adapter.batch_size), "batch arrays": rank_consistency.shapes(arrays)}


def compare_batches(
    adapter: keras_private.DataAdapter, batches_of_process: Iterable[object], session: Session
) -> Any:
    """Compares the batches of a data adapter between ranks, if no step would.

    The loader of a `DistributedSampler` gives this rank's own rows, whatever the distribution says.
    """
    if session.mesh.size == 1:
        return batches_of_process
    auto = bool(session.distribution.auto_shard_dataset)
    sampler = _distributed_sampler(adapter)
    if sampler is not None:
        _check_sampler(sampler, session)
    shared = auto and sampler is None
    known = keras_private.arrays_of(adapter) is not None or (
        adapter.num_batches is not None and not shared
    )
    compared = (
        batches_of_process
        if known
        else _Read(batches_of_process, lambda source: _compare_each(source, session, shared))
    )
    if auto and not shared:
        return _Read(
            compared, lambda source: (batches.join_own_rows(batch, session) for batch in source)
        )
    return compared


@attrs.frozen
class _Read:
    """Batches that are read by a generator.

    An iterator of it makes that of its source at once, as Keras does: a `DataLoader` draws a seed
    then, from torch's generator or its own, and the order of rows follows from it.
    """

    source: Iterable[object]
    read: Callable[[Iterator[object]], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.read(iter(self.source))


def _distributed_sampler(adapter: keras_private.DataAdapter) -> DistributedSampler[Any] | None:
    loader = keras_private.loader_of(adapter)
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) else None


def _check_sampler(sampler: DistributedSampler[object], session: Session) -> None:
    """Refuses a sampler that shards rows otherwise than the batch axis."""
    shards = session.mesh.size_along(session.batch_axes)
    shard = session.mesh.position_along(session.batch_axes, session.world.position)
    if (sampler.num_replicas, sampler.rank) != (shards, shard):
        raise RankMismatchError(
            f"Rank {session.processes.rank} is at place {shard} of {shards} of "
            f"{named_axes(session.batch_axes)}, and the DistributedSampler of its DataLoader gives "
            f"the rows of rank {sampler.rank} of {sampler.num_replicas}: give it "
            f"num_replicas={shards} and rank=distribution.data_shard_id."
        )


_END = object()


def _compare_each(source: Iterator[object], session: Session, shared: bool) -> Iterator[Any]:
    """Yields the batches, after a check that all ranks have one; shared ones of equal shapes.

    Without it, a further step of a rank or another shape would block a collective of the step.
    """
    for number, batch in enumerate(chain(source, [_END])):
        is_end = batch is _END
        facts = {"steps per epoch": f"{'' if is_end else 'more than '}{number}"}
        if shared and not is_end:
            facts[f"batch {number}"] = rank_consistency.shapes(batch)
            if number == 0:  # content too: rows in another order have one shape
                facts |= rank_consistency.batch_facts(batch, session)
        rank_consistency.compare(facts, session)
        if not is_end:
            yield batch
