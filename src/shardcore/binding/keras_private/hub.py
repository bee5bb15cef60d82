"""The module of keras-hub that exports models, which is imported by the first export (ADR 45)."""

import builtins
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import attrs

EXPORTER = "keras_hub.src.utils.transformers.export.hf_exporter"
Change = Callable[[ModuleType], None]


def change_exporter(replacements: dict[str, Callable[[Any], object]], undo: ExitStack) -> None:
    """Gives functions of the module new values, now or when it is imported, until `undo`.

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

    if EXPORTER in sys.modules:
        change(sys.modules[EXPORTER])
        return
    finder = _Awaited(EXPORTER, change)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)


@attrs.frozen(eq=False)
class _Awaited(MetaPathFinder):
    """Finds a module as the other finders do, and changes it after its import."""

    name: str
    change: Change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns what the others find, None of other modules."""
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
    change: Change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns the module, None for the default one."""
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, and changes it."""
        self.loader.exec_module(module)
        self.change(module)
