"""How a variable's path may be spelled: Keras' names and PyTorch's names for the same thing."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SEPARATORS: Final = ("/", ".")

# Only names that mean one thing wherever they stand. Left out: RMSNormalization's `scale` (in an
# attention layer `scale` is no torch weight), PReLU's `alpha`, and the LSTM `kernel` as
# `weight_ih` (a rule `.*weight_.*` would then match every kernel).
KERAS_TO_TORCH: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kernel": "weight",
        "embeddings": "weight",
        "gamma": "weight",
        "beta": "bias",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
        "recurrent_kernel": "weight_hh",
    }
)


def _reverse(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {
        torch: tuple(keras for keras in names if names[keras] == torch)
        for torch in dict.fromkeys(names.values())
    }


TORCH_TO_KERAS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(_reverse(KERAS_TO_TORCH))


def slashed(path: str) -> str:
    """Returns `path` with every separator written as a slash."""
    return path.replace(".", "/")


def dotted(path: str) -> str:
    """Returns `path` with every separator written as a dot."""
    return path.replace("/", ".")


def spellings(path: str) -> tuple[str, ...]:
    """Returns every way to write `path`, as it was given first.

    The separators may be all `/` or all `.`, and the last name may be any that Keras or PyTorch
    gives to the same variable. A path with a slash is Keras' own, so its last name is read as a
    Keras name: `dense/bias` is a bias and never a `beta`. A path without one may be PyTorch's.

    Example:
        >>> spellings("dense/kernel")
        ('dense/kernel', 'dense/weight', 'dense.kernel', 'dense.weight')
        >>> spellings("norm.bias")
        ('norm.bias', 'norm/bias', 'norm/beta', 'norm.beta')
        >>> spellings("dense/bias")
        ('dense/bias', 'dense.bias')
    """
    cut = max(path.rfind(separator) for separator in SEPARATORS) + 1
    names = [path[:cut] + leaf for leaf in _leaf_names(path[cut:], is_keras="/" in path)]
    return tuple(dict.fromkeys([path, *map(slashed, names), *map(dotted, names)]))


def _leaf_names(leaf: str, *, is_keras: bool) -> tuple[str, ...]:
    if leaf in KERAS_TO_TORCH:
        return leaf, KERAS_TO_TORCH[leaf]
    return (leaf,) if is_keras else (leaf, *TORCH_TO_KERAS.get(leaf, ()))
