"""Walks from a model and from the code of its steps to all that this code may read.

An attribute counts if the code that ran names it. What counts is compared, or the step is refused.
"""

import copyreg
import decimal
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state import settings
from shardcore.binding.capture.python_state.code_walk import CodeWalk
from shardcore.binding.capture.python_state.known_modules import is_library
from shardcore.binding.capture.python_state.objects import refers_to
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.binding.capture.python_state.watched import WatchedValues
from shardcore.binding.capture.signatures import Closures
from shardcore.binding.ranks.rank_consistency import variables_of
from shardcore.domain.capture import NotCaptured
from shardcore.ports.capture import StepCapture

_UNKNOWN = object()
_OF_PATTERNS = (Sequence, Mapping)  # `match` asks whether a class is registered with them
_THREADS = frozenset({"current_thread", "main_thread"})  # steps run on it


def watch_state(
    trainer: Any,
    called: ObservedCalls,
    capture: StepCapture[torch.Tensor],
    closures: Closures | None = None,
) -> WatchedValues:
    """Walks to all that the steps of `trainer`, which call the functions `called`, may read.

    Args:
        trainer: The model.
        called: The functions.
        capture: Reads what changes of tensors and dicts.
        closures: Of a function that each call makes again: the objects in them. Their key is
            compared elsewhere.

    Raises:
        NotCaptured: If the code may read what cannot be compared.
    """
    captured = closures or Closures.of()

    def walk_by(names: frozenset[str] | None) -> _StepWalk:
        walk = _StepWalk(called, names, WatchedValues(capture.metadata_of, capture.dict_version))
        called.check_calls()
        walk.visit_model(trainer)
        walk.visit_objects(captured.objects)
        walk.visit_code(captured.codes)
        walk.check_weak_references()
        walk.check_names()
        walk.visit_environment()
        walk.visit_standard_functions()
        walk.watch_methods()
        return walk

    names = called.attribute_names()
    walk = walk_by(names)
    if walk.names_are_computed and names is not None:
        walk = walk_by(None)
    return walk.watched


@attrs.define(eq=False)
class _StepWalk(CodeWalk):
    """A walk from a model, and from the functions that its steps call, to all that they hold."""

    def visit_model(self, trainer: Any) -> None:
        self.watched.add_result(keras_private.global_seed, "Keras' global seed generator")
        seed = keras_private.global_seed()
        for variable in [*variables_of(trainer), *([] if seed is None else [seed])]:
            self._add(variable, f"variable {variable.path!r}")
        self._add(torch.Tensor, "torch.Tensor")  # that of the tensors in a step
        self.watched.add_content(keras_private.registered_objects, "Keras' registered objects")
        for name, read in keras_private.uncleared_gradients(trainer):
            self.watched.add_result(read, name)
            self._add(read(), name)
        for called, holder, tensors in keras_private.graph_tensors(trainer):
            name = f"an argument of {called!r} in a functional graph"
            self.watched.add_attributes(holder, ("args", "kwargs"), name)
            for tensor in tensors:
                self._add(tensor, name)
        for operation in keras_private.operations_of(trainer):
            self._add(operation, f"operation {operation.name!r}")
        for name, module in keras_private.modules_of(trainer):
            if not keras_private.is_bookkeeping(module, name.rpartition(".")[2]):
                self._add(module, f"module {type(module).__name__!r}")
        for part in keras_private.parts_of(trainer):
            self._add(part, f"{type(part).__name__} of the model")
        self._visit_pending()

    def visit_objects(self, values: Iterable[object]) -> None:
        for value in values:
            self._add(value, f"{type(value).__name__} in a closure")
        self._visit_pending()

    def check_weak_references(self) -> None:
        """Checks that what weak references refer to is held by something else that is compared."""
        targets = [(reference(), name) for reference, name in self.weak]
        visited = list(self.visited.values())
        for proxy, name in self.proxies:  # it does not tell what it refers to
            targets.append((next((v for v in visited if refers_to(proxy, v)), _UNKNOWN), name))
        for target, name in targets:
            if target is not None and id(target) not in self.visited:
                raise NotCaptured(
                    f"it reads {name}, a weak reference to an object that the step reads in no "
                    "other way: read it from an attribute of the layer"
                )

    def check_names(self) -> None:
        """Checks that the step makes no object of Keras whose name it reads.

        Raises:
            NotCaptured: If it may: each run makes another number for the name.
        """
        are_numbered = keras_private.NAMING in self.called.modules_called()
        if are_numbered and "name" in self.user_names and self.called.makes_objects():
            raise NotCaptured(
                "it makes an object of Keras, whose name has another number in each step, and "
                "reads names: make the object outside of the step"
            )

    def visit_environment(self) -> None:
        """Adds the environment, loggers and settings of libraries that the user's code reads."""
        watch = self.watched.add_content
        for read, title in settings.SETTINGS:
            watch(read, title)
        if settings.READ_ENVIRONMENT & (self.user_names | self.called.called_of("os")):
            watch(lambda: dict(os.environ), "os.environ")
        if self.has_decimals or "Decimal" in self.user_names:
            watch(lambda: repr(decimal.getcontext()), "the context of decimal numbers")
        if self.called.prints():
            self._add_named(vars(sys), ("stdout",), "sys")
        self._add_named(*keras_private.global_state_of(self.user_names), "Keras' global state")
        self._visit_pending()
        if "numpy._core.arrayprint" in self.called.modules_called():
            watch(lambda: repr(np.get_printoptions()), "NumPy's options of printing")
        if _THREADS & (self.user_names | self.called.called_of("threading")):
            self._add(threading.current_thread(), "this thread")
            self._visit_pending()
        if "copy" in self.called.modules_called():
            watch(lambda: list(copyreg.dispatch_table.values()), "how objects are copied")
        if "getLogger" in self.user_names | self.called.called_of("logging"):
            loggers = list(logging.root.manager.loggerDict)
            for name in [name for name in loggers if not is_library(name)]:
                self._add(logging.getLogger(name), f"logger {name!r}")
            self._add(logging.root, "the root logger")
            self._visit_pending()
        self.abstract += (kind for kind in _OF_PATTERNS if kind.__name__ in self.user_names)
        registrations = settings.Registrations(tuple(self.abstract))
        watch(registrations, "the classes that are registered with an ABC")
