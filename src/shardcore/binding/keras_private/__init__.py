"""All private Keras names that shardcore replaces or reads. `binding` imports it.

`lines` finds a name in the Keras that is installed; `table` has the replaced ones, each with a
reason; `models` reads the objects of a user; here is the state of the process: distribution,
seeds, files.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from typing import Any

import keras
import numpy
import torch
from keras import Model
from keras.src import optimizers
from keras.src.backend.common import global_state
from keras.src.backend.torch import random as torch_random
from keras.src.callbacks import remote_monitor
from keras.src.distribution import distribution_lib
from keras.src.random import seed_generator
from keras.src.random.seed_generator import draw_seed as draw_seed
from keras.src.saving import saving_lib
from keras.src.utils import file_utils, io_utils
from keras.src.utils.rng_utils import get_random_seed as get_random_seed

from shardcore.binding.keras_private.lines import find
from shardcore.binding.keras_private.models import AUTO as AUTO
from shardcore.binding.keras_private.models import LOOP_STEPS as LOOP_STEPS
from shardcore.binding.keras_private.models import RUNS_NOTED as RUNS_NOTED
from shardcore.binding.keras_private.models import Auto as Auto
from shardcore.binding.keras_private.models import DataAdapter as DataAdapter
from shardcore.binding.keras_private.models import EpochIterator as EpochIterator
from shardcore.binding.keras_private.models import arrays_of as arrays_of
from shardcore.binding.keras_private.models import as_logs as as_logs
from shardcore.binding.keras_private.models import begin_later as begin_later
from shardcore.binding.keras_private.models import copy_mask as copy_mask
from shardcore.binding.keras_private.models import gives_own_logs as gives_own_logs
from shardcore.binding.keras_private.models import graph_tensors as graph_tensors
from shardcore.binding.keras_private.models import hook_of as hook_of
from shardcore.binding.keras_private.models import is_bookkeeping as is_bookkeeping
from shardcore.binding.keras_private.models import is_own_step as is_own_step
from shardcore.binding.keras_private.models import (
    is_saved_in_another_form as is_saved_in_another_form,
)
from shardcore.binding.keras_private.models import is_seed as is_seed
from shardcore.binding.keras_private.models import leaves as leaves
from shardcore.binding.keras_private.models import map_leaves as map_leaves
from shardcore.binding.keras_private.models import map_tensors as map_tensors
from shardcore.binding.keras_private.models import modules_of as modules_of
from shardcore.binding.keras_private.models import moments_of as moments_of
from shardcore.binding.keras_private.models import packed as packed
from shardcore.binding.keras_private.models import parts_of as parts_of
from shardcore.binding.keras_private.models import read_steps as read_steps
from shardcore.binding.keras_private.models import repr_with_value as repr_with_value
from shardcore.binding.keras_private.models import results_of as results_of
from shardcore.binding.keras_private.models import sort_callbacks as sort_callbacks
from shardcore.binding.keras_private.models import weights_by_moment as weights_by_moment
from shardcore.binding.keras_private.rebinding import around as around
from shardcore.binding.keras_private.rebinding import missing as missing
from shardcore.binding.keras_private.rebinding import replace as replace
from shardcore.binding.keras_private.table import PATCHES as PATCHES
from shardcore.binding.keras_private.table import STEPS as STEPS

_get_device = find("keras.src.backend.torch.core:get_device")
CURRENT_DISTRIBUTION: str = distribution_lib.GLOBAL_ATTRIBUTE_NAME


@contextmanager
def without_distribution() -> Iterator[None]:
    """Opens a context in which this thread has no distribution."""
    distribution = distribution_lib.distribution()
    distribution_lib.set_distribution(None)
    try:
        yield
    finally:
        distribution_lib.set_distribution(distribution)


def torch_device() -> Any:
    """Returns the device on which Keras creates tensors."""
    return _get_device()


def generator_of(seed: Any) -> Any:
    """Returns torch's generator for the next draw with `seed`."""
    return torch_random.torch_seed_generator(seed)


def is_symbolic() -> bool:
    """Returns whether Keras is inferring shapes, on the meta device."""
    return str(_get_device()) == "meta"


def is_made_by_optimizer() -> bool:
    """Returns whether the variable in creation is an optimizer's, by its name scope."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    return bool(scopes) and isinstance(scopes[-1].caller, optimizers.Optimizer)


def settings() -> tuple[Any, ...]:
    """Returns the settings of `keras.config` that layers and losses read in their calls."""
    attention = global_state.get_global_attribute("flash_attention")
    settings = keras.config
    return settings.epsilon(), settings.floatx(), settings.image_data_format(), attention


def global_seed() -> Any:
    """Returns the state of the generator of random layers without a seed; None before its use."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_global_seed() -> None:
    """Makes the generator of random layers without a seed, if there is none."""
    seed_generator.global_seed_generator()


@contextmanager
def unnoticed() -> Iterator[None]:
    """Restores Keras' counts of names and its seeds at the end, for a model that is built inside.

    No distribution may be set.
    """
    before = dict(vars(global_state.GLOBAL_STATE_TRACKER))
    names = copy(before.get("object_name_uids"))
    global_state.set_global_attribute("object_name_uids", names)
    try:
        with generators_kept():
            yield
    finally:
        now = vars(global_state.GLOBAL_STATE_TRACKER)  # another generator after a clear_session()
        now.clear()
        now.update(before)


@contextmanager
def generators_kept(gpus: Sequence[int] | None = None) -> Iterator[None]:
    """Restores the generators of Python, NumPy and torch at the end."""
    drawn = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])


class _NoFile(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store that gathers each value for the rank that writes, and stores none."""

    def __init__(self) -> None:
        self.archive = None

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: object = None) -> "_NoFile":
        return self

    def __setitem__(self, key: str, value: object) -> None:
        keras.ops.convert_to_numpy(value)

    def close(self) -> None:
        pass


def gather_model(model: Model) -> None:
    """Visits the config and the state of `model` as saving does, and writes nothing."""
    saving_lib._serialize_model_as_json(model)
    gather_state(model)


def gather_state(model: Model, objects_to_skip: Iterable[object] | None = None) -> None:
    """Visits the state of `model` as saving does, in the same order, and writes nothing."""
    with closing(saving_lib.DiskIOStore("assets", mode="w")) as scratch:
        saving_lib._save_state(
            model,
            weights_store=_NoFile(),
            assets_store=scratch,
            inner_path="",
            visited_saveables={id(each) for each in objects_to_skip or ()},
        )


class _Keys(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store that notes the keys of variables, and stores nothing."""

    def __init__(self) -> None:
        self.archive = None
        self.found: dict[int, str] = {}
        self._group = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: object = None) -> "_Keys":
        self._group = path
        return self

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, keras.Variable):
            self.found[id(value)] = "/".join(filter(None, (self._group, "vars", key)))

    def close(self) -> None:
        pass


def weight_keys(model: Model) -> dict[int, str]:
    """Returns the keys in weight files, by the `id` of each variable that is stored as it is.

    A layer with LoRA, a quantized layer and a torch module store other values.
    """
    store = _Keys()
    optimizer = getattr(model, "optimizer", None)
    others = [each for each in model._flatten_layers() if is_saved_in_another_form(each)]
    saving_lib._save_state(
        model,
        weights_store=store,
        assets_store=None,
        inner_path="",
        visited_saveables={id(each) for each in (*others, optimizer)},
    )
    moments = enumerate(getattr(optimizer, "variables", ()))
    return store.found | {id(each): f"optimizer/vars/{number}" for number, each in moments}


def can_send() -> bool:
    """Returns whether `requests`, which `RemoteMonitor` needs, is installed."""
    return remote_monitor.requests is not None


def print_message(message: str) -> None:
    """Prints as Keras does, to standard output or to its log."""
    io_utils.print_msg(message)


def is_remote(path: str) -> bool:
    """Returns whether Keras writes `path` by a remote file system."""
    return bool(file_utils.is_remote_path(path)) or path.startswith("hf://")
