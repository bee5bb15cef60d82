"""The functions of `shardcore` for files of others: safetensors, and checkpoints of torch.

The examples have the model of `shardcore.api`, and a directory::

    import tempfile

    directory = tempfile.mkdtemp()
    names = {"net/hidden/kernel": ("hidden.weight", "o i -> i o"), "net/hidden/bias": "hidden.bias"}
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardcore import bootstrap
from shardcore.domain.checkpoints.contents import Loaded
from shardcore.domain.checkpoints.weight_keys import Keys
from shardcore.domain.errors import ArgumentProblem
from shardcore.ports.checkpoints import WeightStore
from shardcore.ports.types import KerasModel

if TYPE_CHECKING:
    from shardcore.binding.checkpoints.weights import WeightFiles

_GIB = 2**30


def load_safetensors(
    model: KerasModel,
    path: str | os.PathLike[str],
    keys: Keys = None,
    *,
    strict: bool = True,
) -> Loaded:
    """Loads weights from safetensors files, as of Transformers. All ranks call it together.

    Each rank reads bytes of its shards, and no others, unless `keys` has a function for a variable.
    What several ranks of a host need one of them reads, and sends it to the others. Values of
    another float dtype are cast.

    Args:
        model: The built Keras model, on any mesh and in any layout.
        path: A file, or a folder of files with their index, as on the Hugging Face hub.
        keys: The key in the files by the path of a variable: a dict, or a function of the path.
            Instead of a key it may give a key and a transform: a pattern as of einops, from the
            dims in the file to those of the variable, such as "(h d) m -> m h d"; or a function
            of the full tensor in the file. A variable with None stays as it is. By default the
            path is the key.
        strict: Whether each variable and each tensor has to fit. If not, those that fit are
            loaded, and the report names the others.

    Returns:
        The report: the variables that were loaded, and the keys that were not used.

    Raises:
        ArgumentProblem: If `keys` is neither a dict nor a function.
        CheckpointError: If a file is missing or damaged, or does not fit. The model has not
            changed then. Only after an error while values are read, of the disk or of a function
            in `keys`, it has a part of them: load it again.

    Example:
        >>> folder = shardcore.save_safetensors(model, f"{directory}/hub", names)
        >>> shardcore.load_safetensors(model, folder, names).variables
        ('net/hidden/kernel', 'net/hidden/bias')
    """
    return _safetensors().load(model, path, keys, strict)


def save_safetensors(
    model: KerasModel,
    path: str | os.PathLike[str],
    keys: Keys = None,
    *,
    max_shard_size: float = 5,
) -> Path:
    """Saves weights in safetensors files, as Transformers reads them. All ranks call it together.

    Each rank writes its shards into the files, which get their names when they are complete.

    Args:
        model: The built Keras model.
        path: A file that ends in .safetensors, which is replaced; or a folder, which may not have
            weights yet. All hosts share its file system.
        keys: As of `load_safetensors`, with patterns only: the same map reads and writes. A
            variable with None is not written.
        max_shard_size: The size in GB of the files in a folder, as in `model.save_weights`.

    Returns:
        The path.

    Raises:
        ArgumentProblem: If two variables have one key, or a transform cannot be undone.
        CheckpointError: If the folder has weights.

    Example:
        >>> file = shardcore.save_safetensors(model, f"{directory}/a.safetensors", names)
        >>> file.name
        'a.safetensors'
    """
    if not (isinstance(max_shard_size, int | float) and 0 < max_shard_size < math.inf):
        raise ArgumentProblem(
            f"Expected max_shard_size to be a number above 0, in GB, got {max_shard_size!r}.",
            name="max_shard_size",
            got=repr(max_shard_size),
        )
    return _safetensors().save(model, path, keys, int(max_shard_size * _GIB))


def load_dcp(
    model: KerasModel,
    path: str | os.PathLike[str],
    keys: Keys = None,
    *,
    strict: bool = True,
) -> Loaded:
    """Loads weights from a folder of `torch.distributed.checkpoint`. All ranks call it together.

    It may have been written on any mesh. Torch reads a stored chunk as a whole: one rank of a host
    does, and sends it to those that need a part. The metadata of the folder is a pickle: load only
    what you trust.

    Args:
        model: The built Keras model, on any mesh and in any layout.
        path: The folder.
        keys: As of `load_safetensors`. A key of a nested state dict has points: "model.w".
        strict: As of `load_safetensors`. A state of an optimizer has no variable, so a folder with
            one needs `strict=False`.

    Returns:
        The report: the variables that were loaded, and the keys that were not used.

    Raises:
        ArgumentProblem: As in `load_safetensors`.
        CheckpointError: As in `load_safetensors`.

    Example:
        >>> folder = shardcore.save_dcp(model, f"{directory}/dcp", names)
        >>> shardcore.load_dcp(model, folder, names).variables
        ('net/hidden/kernel', 'net/hidden/bias')
    """
    return _dcp().load(model, path, keys, strict)


def save_dcp(model: KerasModel, path: str | os.PathLike[str], keys: Keys = None) -> Path:
    """Saves weights as `torch.distributed.checkpoint` does. All ranks call it together.

    Each rank writes its shards. `torch.distributed.checkpoint.load` reads the folder, in any number
    of processes and without shardcore.

    Args:
        model: The built Keras model.
        path: The folder, which is made if it is missing, and has to be empty.
        keys: As of `save_safetensors`.

    Returns:
        The folder.

    Raises:
        ArgumentProblem: If two variables have one key, or a transform cannot be undone.
        CheckpointError: If the folder is not empty.

    Example:
        >>> shardcore.save_dcp(model, f"{directory}/weights", names).name
        'weights'
    """
    return _dcp().save(model, path, keys, 0)


def load_orbax(model: KerasModel, path: str | os.PathLike[str], *, strict: bool = True) -> Loaded:
    """Loads what Keras' `OrbaxCheckpoint` has saved, on any backend. All ranks call it together.

    It loads the weights, the seeds and the state of the optimizer, by the paths of the variables.
    Metrics are left out. One rank of a host reads a stored chunk, and sends it to those that need a
    part of it. It needs the package `orbax-checkpoint`.

    Args:
        model: The built Keras model, on any mesh and in any layout.
        path: The directory of `OrbaxCheckpoint`, for its newest step, or the folder of a step.
        strict: Whether each variable of the model and each array has to fit. A folder without the
            optimizer, or a model without one, needs `strict=False`.

    Returns:
        The report: the variables that were loaded, and the arrays that were not used.

    Raises:
        CheckpointError: As in `load_safetensors`.
        EnvironmentProblem: If the package is missing.

    Example:
        >>> shardcore.load_orbax(model, directory)
        Traceback (most recent call last):
            ...
        shardcore.domain.errors.CheckpointError: ...
    """
    from shardcore.adapters.checkpoints.orbax_folders import OrbaxFolders
    from shardcore.binding.checkpoints.weight_loading import WeightLoading, state_tree_of

    sessions = bootstrap.installation().binding.sessions
    remedy = "Build and compile the model that was saved, with the same names of layers"
    source = OrbaxFolders()
    return WeightLoading(sessions, source, "orbax", state_tree_of, remedy).load(
        model, path, None, strict
    )


def _safetensors() -> "WeightFiles":
    from shardcore.adapters.checkpoints.hub_folders import HubFolders

    return _files(HubFolders(), "safetensors")


def _dcp() -> "WeightFiles":
    from shardcore.adapters.checkpoints.dcp import DcpFolders

    return _files(DcpFolders(), "dcp")


def _files(store: WeightStore, name: str) -> "WeightFiles":
    sessions = bootstrap.installation().binding.sessions
    from shardcore.binding.checkpoints.weights import WeightFiles

    return WeightFiles(sessions, store, name)
