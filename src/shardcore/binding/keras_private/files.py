"""Files: what Keras visits as it saves a model, the keys of its weights, keras-hub's exporter."""

import builtins
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import attrs
import keras
from keras import Model
from keras.src.legacy.saving import legacy_h5_format, saving_options, saving_utils
from keras.src.saving import saving_lib
from keras.src.utils import file_utils

from shardcore.binding.keras_private.models import is_saved_in_another_form, layers_of

# keras-hub imports it by the first export (ADR 45).
_EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"
_Change = Callable[[ModuleType], None]


class _NoFile(saving_lib.H5IOStore):  # type: ignore[misc]
    """A store that all-gathers each value for the rank that writes, and stores none (ADR 11)."""

    def __init__(self) -> None:
        self.archive = None
        self._group = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: object = None) -> "_NoFile":
        self._group = path
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
            visited_saveables={id(skipped) for skipped in objects_to_skip or ()},
        )


def gather_legacy(model: Model, include_optimizer: bool) -> None:
    """Visits the config and the state of `model` as saving to HDF5 does, and writes nothing.

    A rank that attends holds one full variable at a time; the one that writes, those of a layer.
    """
    with saving_options.keras_option_scope(use_legacy_config=True):
        saving_utils.model_metadata(model, include_optimizer)
    for layer in sorted(model.layers, key=lambda layer: layer.name):
        _gather(legacy_h5_format._legacy_weights(layer))
    own = model._trainable_variables + model._non_trainable_variables
    _gather(variable for variable in own if variable in model.weights)
    if include_optimizer:
        _gather(getattr(getattr(model, "optimizer", None), "variables", ()))


def _gather(variables: Iterable[keras.Variable]) -> None:
    for variable in variables:
        keras.ops.convert_to_numpy(variable)


class _Keys(_NoFile):
    """A store that notes the keys of variables, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_by_id: dict[int, str] = {}

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, keras.Variable):
            self.keys_by_id[id(value)] = "/".join(filter(None, (self._group, "vars", key)))


def weight_keys(model: Model) -> dict[int, str]:
    """Finds the keys in weight files, by the `id` of each variable that is stored as it is.

    A layer with LoRA, a quantized layer and a torch module store other values.
    """
    store = _Keys()
    optimizer = getattr(model, "optimizer", None)
    others = [layer for layer in layers_of(model) if is_saved_in_another_form(layer)]
    saving_lib._save_state(
        model,
        weights_store=store,
        assets_store=None,
        inner_path="",
        visited_saveables={id(skipped) for skipped in (*others, optimizer)},
    )
    moments = enumerate(getattr(optimizer, "variables", ()))
    return store.keys_by_id | {id(moment): f"optimizer/vars/{number}" for number, moment in moments}


def is_remote(path: str) -> bool:
    """Tells whether Keras writes `path` by a remote file system."""
    return bool(file_utils.is_remote_path(path)) or path.startswith("hf://")


def change_exporter(replacements: dict[str, Callable[[Any], object]], undo: ExitStack) -> None:
    """Replaces functions of the module, now or when it is imported, until `undo`.

    `replacements` has, by name, a function from the old value to the new one. A name that the
    module lacks is a builtin function.
    """

    def change(module: ModuleType) -> None:
        namespace = vars(module)
        for name, make in replacements.items():
            if name in namespace:
                undo.callback(setattr, module, name, namespace[name])
                setattr(module, name, make(namespace[name]))
            elif hasattr(builtins, name):
                undo.callback(delattr, module, name)
                setattr(module, name, make(getattr(builtins, name)))

    if _EXPORTER in sys.modules:
        change(sys.modules[_EXPORTER])
        return
    finder = _Awaited(_EXPORTER, change)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)


@attrs.frozen(eq=False)
class _Awaited(MetaPathFinder):
    """Finds a module as the other finders do, and changes it after its import."""

    name: str
    change: _Change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, self.change)
        return spec


@attrs.frozen(eq=False)
class _Changing(Loader):
    """Loads a module as another loader does, and changes it."""

    loader: Any
    change: _Change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.change(module)
