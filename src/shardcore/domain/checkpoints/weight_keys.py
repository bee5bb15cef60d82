"""The weights of a model and the tensors in files of others, paired by a map of keys."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs

from shardcore.domain.checkpoints.contents import VariableToLoad, error_text
from shardcore.domain.checkpoints.file_format import DTYPES, nbytes_of
from shardcore.domain.checkpoints.rearrangement import Rearrangement, rearrangement
from shardcore.domain.errors import ArgumentProblem, CheckpointError

TensorFunction = Callable[..., object]  # a function of the tensor in the file
Key = str | tuple[str, str | TensorFunction] | None
Keys = Mapping[str, Key] | Callable[[str], Key] | None

_CAST = (("float", "bfloat"), ("int", "uint"))  # beginnings of dtypes, cast to each other


@attrs.frozen
class FileTensor:
    """A tensor in a file: its key, the name of its dtype, its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return nbytes_of(self.dtype, self.shape)


@attrs.frozen
class WeightMatch:
    """The weights that can be loaded.

    Args:
        pairs: By the path of a weight the tensor in the file, and what makes the one of the other.
        problems: A line for each weight that is missing, or that does not fit.
        unused: The keys in the files that no weight takes.
    """

    pairs: Mapping[str, tuple[FileTensor, Rearrangement | TensorFunction]]
    problems: tuple[str, ...]
    unused: tuple[str, ...]

    def check(self, path: str, remedy: str) -> None:
        """Raises if a weight has a problem, or a tensor is unused; advises `remedy`.

        Raises:
            CheckpointError: With a line for each of them, up to eight.
        """
        lines = [*self.problems, *(f"{key!r} of the files has no variable" for key in self.unused)]
        if lines:
            raise CheckpointError(
                error_text(
                    f"{path!r} does not fit the model; nothing was loaded:",
                    lines,
                    f"{remedy}, or load what fits with strict=False.",
                ),
                name=path,
            )


def match_weights(
    weights: Sequence[VariableToLoad], keys: Keys, stored: Mapping[str, FileTensor]
) -> WeightMatch:
    """Finds the tensor of each weight; a function of `keys` is not called yet.

    Example:
        >>> kernel = VariableToLoad("", "dense/kernel", "model", (2, 3), "float32")
        >>> stored = {"w": FileTensor("w", "float32", (2, 3))}
        >>> match_weights([kernel], {"dense/kernel": ("w", "o i -> i o")}, stored).problems
        ("'dense/kernel' from 'w' has shape (2, 3) in the file, expected (3, 2)",)
    """
    chosen, problems = _chosen(weights, keys)
    pairs: dict[str, tuple[FileTensor, Rearrangement | TensorFunction]] = {}
    for weight, key, transform in chosen:
        try:
            if key not in stored:
                raise ArgumentProblem("is not in the files")
            pairs[weight.path] = stored[key], _rule(weight, transform, stored[key])
        except ArgumentProblem as problem:
            problems.append(f"{weight.path!r} from {key!r} {problem}")
    taken = {key for _, key, _ in chosen}
    return WeightMatch(pairs, tuple(problems), tuple(key for key in stored if key not in taken))


def _rule(
    weight: VariableToLoad, transform: str | TensorFunction | None, stored: FileTensor
) -> Rearrangement | TensorFunction:
    if stored.dtype not in DTYPES:
        raise ArgumentProblem(f"has dtype {stored.dtype} in the file, which is not read")
    is_cast = any(weight.dtype.startswith(kind) and stored.dtype.startswith(kind) for kind in _CAST)
    if weight.dtype != stored.dtype and not is_cast:
        raise ArgumentProblem(f"has dtype {stored.dtype} in the file, expected {weight.dtype}")
    if callable(transform):
        return transform
    return rearrangement(transform, weight.shape, stored.shape)


def tensors_to_write(
    weights: Sequence[VariableToLoad], keys: Keys
) -> dict[str, tuple[FileTensor, Rearrangement]]:
    """Lists, by the path of a weight, the tensor to write and how it is rearranged.

    Raises:
        ArgumentProblem: If a weight has no key, two have one, or a transform cannot be undone.

    Example:
        >>> kernel = VariableToLoad("", "dense/kernel", "model", (2, 3), "float32")
        >>> tensors_to_write([kernel], lambda path: ("w", "o i -> i o"))["dense/kernel"][0]
        FileTensor(key='w', dtype='float32', shape=(3, 2))
    """
    chosen, problems = _chosen(weights, keys)
    tensors: dict[str, tuple[FileTensor, Rearrangement]] = {}
    path_of: dict[str, str] = {}
    for weight, key, transform in chosen:
        try:
            if path_of.setdefault(key, weight.path) != weight.path:
                raise ArgumentProblem(f"has the key of {path_of[key]!r}")
            if callable(transform):
                raise ArgumentProblem("has a function, which cannot be undone: write a pattern")
            if weight.dtype not in DTYPES:
                raise ArgumentProblem(f"has dtype {weight.dtype}, which no file stores")
            rule = rearrangement(transform, weight.shape)
            tensors[weight.path] = FileTensor(key, weight.dtype, rule.file_shape), rule
        except ArgumentProblem as problem:
            problems.append(f"{weight.path!r} as {key!r} {problem}")
    if problems:
        raise ArgumentProblem(
            error_text("Nothing was written:", problems, "Correct `keys`."), name="keys"
        )
    return tensors


def state_tree_key(group: str, path: str) -> str:
    """Joins a group of Keras' state tree and the path of a variable in it.

    An optimizer loses the number that Keras gave it.

    Example:
        >>> state_tree_key("optimizer_variables", "adam_1/iteration")
        'optimizer_variables/adam/iteration'
    """
    if group == "optimizer_variables":
        path = re.sub(r"^([^/]*?)_\d+/", r"\1/", path)
    return f"{group}/{path}"


_Chosen = tuple[VariableToLoad, str, str | TensorFunction | None]


def _chosen(weights: Sequence[VariableToLoad], keys: Keys) -> tuple[list[_Chosen], list[str]]:
    """Asks `keys` for each weight; a weight with None is left out."""
    if not (keys is None or isinstance(keys, Mapping) or callable(keys)):
        raise ArgumentProblem(
            f"Expected `keys` to be a dict, a function of the path of a variable or None, got "
            f"{keys!r}.",
            name="keys",
            expected="a dict, a function or None",
            got=repr(keys),
        )
    chosen: list[_Chosen] = []
    problems = []
    paths = {weight.path for weight in weights}
    if isinstance(keys, Mapping):
        problems += [f"{path!r} of `keys` is no variable" for path in keys if path not in paths]
    counts = Counter(weight.path for weight in weights)
    problems += [
        f"{path!r} is the path of {count} variables: give their layers other names"
        for path, count in counts.items()
        if count > 1
    ]
    for weight in weights:
        if counts[weight.path] > 1:
            continue
        if isinstance(keys, Mapping) and weight.path not in keys:
            problems.append(f"{weight.path!r} is not in `keys`: give its key, or None")
            continue
        key = _key(weight.path, keys)
        if key is not None:
            chosen.append((weight, *key))
    return chosen, problems


def _key(path: str, keys: Keys) -> tuple[str, str | TensorFunction | None] | None:
    if keys is None:
        return path, None
    key = keys[path] if isinstance(keys, Mapping) else keys(path)
    if key is None:
        return None
    name, transform = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
    if not isinstance(name, str) or not (
        transform is None or isinstance(transform, str) or callable(transform)
    ):
        raise ArgumentProblem(
            f"Expected a text as the key of {path!r}, or a text and a transform, got {key!r}.",
            name=path,
            expected="a text, or a text and a transform",
            got=repr(key),
        )
    return name, transform
