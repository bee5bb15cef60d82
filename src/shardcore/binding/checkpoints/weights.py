"""Files of others: each rank reads the bytes of its shards and writes its own, piece by piece."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import keras
import torch

from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.collective_ranks import Ranks
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.checkpoints.weight_loading import WeightLoading, digest
from shardcore.binding.checkpoints.weight_reading import in_order_of_file
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.checkpoints.contents import Loaded, divide, pieces_of_rank
from shardcore.domain.checkpoints.grid import HeldPart
from shardcore.domain.checkpoints.rearrangement import Rearrangement
from shardcore.domain.checkpoints.weight_keys import FileTensor, Keys, tensors_to_write
from shardcore.ports.checkpoints import PartToWrite, WeightStore, WeightTarget


@attrs.frozen(eq=False)
class WeightFiles:
    """Loads and saves the weights of models in files of one format.

    Args:
        sessions: The sessions.
        store: The format.
        name: Its name in the public functions: "load_dcp" has "dcp".
    """

    sessions: Sessions
    store: WeightStore
    name: str

    def load(
        self, model: keras.Model, path: str | os.PathLike[str], keys: Keys, strict: bool
    ) -> Loaded:
        """Loads weights, as `WeightLoading` does."""
        return WeightLoading(self.sessions, self.store, self.name).load(model, path, keys, strict)

    def save(
        self, model: keras.Model, path: str | os.PathLike[str], keys: Keys, limit: int
    ) -> Path:
        """Saves weights; a replicated part is written by one of its ranks. A collective.

        Raises:
            ArgumentProblem: On all ranks, before a file is written.
        """
        ranks = Ranks.of_model(model, self.sessions, f"save_{self.name}")
        target = Path(path).absolute()
        what = f"write {str(target)!r}"
        weights = state.weights_of(model, ranks.session)
        listed = [weight.to_load() for weight in weights]
        tensors = ranks.run(partial(tensors_to_write, listed, keys), what)
        facts = {"files of weights": str(target), "keys of weights": digest((tensors, limit))}
        ranks.compare(facts)
        request = WeightTarget(target, tuple(tensor for tensor, _ in tensors.values()), limit)
        chosen = [weight for weight in weights if weight.path in tensors]
        parts = list(_parts(chosen, tensors, ranks.position))
        is_first = ranks.position == 0
        ranks.run(lambda: self.store.check(request) if is_first else None, what)
        try:
            ranks.run(lambda: self.store.begin(request) if is_first else None, what)
            ranks.run(partial(self.store.write, request, parts), what)
            ranks.run(lambda: self.store.complete(request) if is_first else None, what)
        except BaseException:
            if is_first:
                self.store.discard(request)
            raise
        return target


def _parts(
    weights: Sequence[StateTensor],
    tensors: Mapping[str, tuple[FileTensor, Rearrangement]],
    position: int,
) -> Iterator[PartToWrite]:
    """Yields what this rank writes."""
    stored = divide(weight.to_store() for weight in weights)
    layouts = (weight.layout for weight in weights)
    local_of = {weight.name: weight.local for weight in weights}
    for owned in pieces_of_rank(zip(stored, layouts, strict=True), position):
        tensor, rule = tensors[owned.variable]
        held = HeldPart(owned.full, owned.local)
        for pair in rule.box_pairs(owned.full):
            local = in_order_of_file(local_of[owned.variable], pair, held.local_box(pair.variable))
            yield PartToWrite(tensor, pair.file, partial(_bytes, local))


def _bytes(values: torch.Tensor) -> memoryview:
    """Copies values to the host, in row-major order."""
    return state.bytes_of(values.to("cpu").contiguous())
