"""Loads files of others: the ranks pair weights and tensors, and then read."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import keras
import torch

from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.collective_ranks import Ranks
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.checkpoints.weight_reading import WeightReading
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.checkpoints.contents import Loaded
from shardcore.domain.checkpoints.rearrangement import Rearrangement
from shardcore.domain.checkpoints.weight_keys import (
    FileTensor,
    Keys,
    TensorFunction,
    WeightMatch,
    match_weights,
    state_tree_key,
)
from shardcore.domain.errors import describe_error
from shardcore.ports.checkpoints import WeightReader, WeightSource


def state_tree_of(model: keras.Model, session: Session | None) -> list[StateTensor]:
    """Lists the variables by their paths in the state tree of Keras, without those of metrics."""
    state.check_built(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    groups = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": getattr(optimizer, "variables", ()),
    }
    return [
        attrs.evolve(
            state.of_variable(variable.path, group, variable, session),
            path=state_tree_key(group, variable.path),
        )
        for group, variables in groups.items()
        for variable in variables
    ]


@attrs.frozen(eq=False)
class WeightLoading:
    """Loads the variables of models from files of one format.

    Args:
        sessions: The sessions.
        source: The format.
        name: Its name in the public functions: "load_dcp" has "dcp".
        tensors_of: Lists the variables.
        remedy: What to do if they do not fit, for the error.
    """

    sessions: Sessions
    source: WeightSource
    name: str
    tensors_of: Callable[[keras.Model, Session | None], list[StateTensor]] = state.weights_of
    remedy: str = "Correct `keys`"

    def load(
        self, model: keras.Model, path: str | os.PathLike[str], keys: Keys, strict: bool
    ) -> Loaded:
        """Loads variables, on any mesh and in any layout. A collective.

        Raises:
            CheckpointError: On all ranks, before a value of the model has changed.
        """
        ranks = Ranks.of_model(model, self.sessions, f"load_{self.name}")
        given = Path(path).absolute()
        what = f"read {str(given)!r}"
        folder = ranks.choose(partial(self.source.find, given), what)
        assert folder is not None
        weights = self.tensors_of(model, ranks.session)
        with ExitStack() as files:
            reader = ranks.run(lambda: files.enter_context(self.source.reading(folder)), what)
            matched = ranks.run(partial(_match, weights, keys, reader), what)
            facts = (
                matched.problems,
                matched.unused,
                [
                    (path, tensor, rule if isinstance(rule, Rearrangement) else "function")
                    for path, (tensor, rule) in matched.pairs.items()
                ],
            )
            ranks.compare({what: digest(facts), "strict": str(strict)})
            if strict:
                matched.check(str(folder), self.remedy)
            reading = WeightReading(reader, ranks.session)
            bytes_read = ranks.run(partial(_read, reading, weights, matched), what)
        loaded = tuple(matched.pairs)
        return Loaded(str(folder), 0, {}, loaded, matched.problems, matched.unused, bytes_read)


def digest(facts: object) -> str:
    """Shortens facts that the ranks compare."""
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
