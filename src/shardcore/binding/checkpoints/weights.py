"""Files of others: each rank reads the bytes of its shards and writes its own, piece by piece."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import keras
import torch

from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.collective_ranks import Ranks
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.checkpoints.weight_reading import WeightReading, in_order_of_file
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.checkpoints.contents import Loaded, divide, pieces_of_rank
from shardcore.domain.checkpoints.grid import HeldPart
from shardcore.domain.checkpoints.rearrangement import Rearrangement
from shardcore.domain.checkpoints.weight_keys import (
    FileTensor,
    Keys,
    TensorFunction,
    WeightMatch,
    match_weights,
    tensors_to_write,
)
from shardcore.domain.errors import describe_error
from shardcore.ports.checkpoints import PartToWrite, WeightReader, WeightStore, WeightTarget


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
        """Loads weights, on any mesh and in any layout. A collective.

        Raises:
            CheckpointError: On all ranks, before a value of the model has changed.
        """
        ranks = Ranks.of_model(model, self.sessions, f"load_{self.name}")
        folder = Path(path).absolute()
        what = f"read {str(folder)!r}"
        weights = state.weights_of(model, ranks.session)
        with ExitStack() as files:
            reader = ranks.run(lambda: files.enter_context(self.store.reading(folder)), what)
            matched = ranks.run(partial(_match, weights, keys, reader), what)
            facts = (
                matched.problems,
                matched.unused,
                [
                    (path, tensor, rule if isinstance(rule, Rearrangement) else "function")
                    for path, (tensor, rule) in matched.pairs.items()
                ],
            )
            ranks.compare({what: _digest(facts), "strict": str(strict)})
            if strict:
                matched.check(str(folder))
            reading = WeightReading(reader, ranks.session)
            bytes_read = ranks.run(partial(_read, reading, weights, matched), what)
        loaded = tuple(matched.pairs)
        return Loaded(str(folder), 0, {}, loaded, matched.problems, matched.unused, bytes_read)

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
        facts = {"files of weights": str(target), "keys of weights": _digest((tensors, limit))}
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


def _digest(facts: object) -> str:
    return hashlib.sha256(str(facts).encode()).hexdigest()[:12]


def _match(weights: Sequence[StateTensor], keys: Keys, reader: WeightReader) -> WeightMatch:
    """Pairs the weights and the tensors, and tries the functions of `keys` without values."""
    matched = match_weights([weight.to_load() for weight in weights], keys, reader.tensors)
    shapes = {weight.path: weight.shape for weight in weights}
    pairs, problems = dict(matched.pairs), list(matched.problems)
    for path, (tensor, rule) in matched.pairs.items():
        problem = reader.problem(tensor)
        if not problem and not isinstance(rule, Rearrangement):
            problem = _problem(rule, tensor, shapes[path])
        if problem:
            del pairs[path]
            problems.append(f"{path!r} from {tensor.key!r} {problem}")
    return attrs.evolve(matched, pairs=pairs, problems=tuple(problems))


def _problem(function: TensorFunction, tensor: FileTensor, shape: tuple[int, ...]) -> str:
    """Says what is wrong with the result of a function; empty if nothing is."""
    value = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
    try:
        result = function(value)
    except Exception as error:  # noqa: BLE001 - the function is the user's
        return f"has a function that fails: {describe_error(error)}"
    if not isinstance(result, torch.Tensor):
        return f"has a function that gives {type(result).__name__}, expected a tensor"
    given = tuple(result.shape)
    return "" if given == shape else f"has shape {given} after its function, expected {shape}"


def _read(reading: WeightReading, weights: Sequence[StateTensor], matched: WeightMatch) -> int:
    """Reads what this rank holds, and returns the bytes that it has read from files."""
    with torch.no_grad():
        for weight in weights:
            if weight.path in matched.pairs:
                reading.read(weight, *matched.pairs[weight.path])
    return reading.finish()


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
