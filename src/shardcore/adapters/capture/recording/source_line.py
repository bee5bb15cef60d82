"""The line of Python that a recorded step is at, for messages."""

import os
import sys
from pathlib import Path

import torch

from shardcore.adapters import torch_private
from shardcore.ports.measurement import layer_scope

# The folders of torch and shardcore.
_PACKAGES = str(Path(torch.__file__).parent), str(Path(__file__).parents[3])
# Keras' files that convert, read and assign what their caller names: the caller's line says more.
_CONVERSIONS = tuple(
    os.path.join("keras", "src", *path)
    for path in (
        ("backend", "common", "variables.py"),
        ("backend", "torch", "core.py"),
        ("ops", "core.py"),
    )
)


def source_line() -> str:
    """Finds the running line of Python, and the layer, or that it is a backward pass."""
    layer = layer_scope.now()
    if layer:
        return f"{_line()}, in layer {layer!r}"
    return f"{_line()}, in a backward pass" if torch_private.backward_pass() >= 0 else _line()


def _line() -> str:
    """Skips the frames of torch, shardcore and conversions."""
    frame = sys._getframe(1)  # noqa: SLF001 - the name is documented, for uses like this one
    while frame.f_back is not None and _is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_skipped(file: str) -> bool:
    return file.startswith(_PACKAGES) or file.endswith(_CONVERSIONS)
