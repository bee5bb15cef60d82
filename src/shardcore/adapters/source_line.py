"""The line of Python that a recorded step is at, for messages."""

import os
import sys
from functools import cache
from pathlib import Path
from types import CodeType

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.ports.measurement import layer_scope

# The folders of torch and shardcore.
_PACKAGES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
# Keras' files that convert, read and assign what their caller names: the caller's line says more.
_CONVERSIONS = tuple(
    os.path.join("keras", "src", *path)
    for path in (
        ("backend", "common", "variables.py"),
        ("backend", "torch", "core.py"),
        ("ops", "core.py"),
    )
)


@attrs.frozen(eq=False)
class SourceLine:
    """A line of Python, and the layer or the backward pass that ran it.

    Every operator of a recorded step has one and few are shown, so the text is made when it is.

    Args:
        code: The function.
        instruction: The index of the instruction in its bytecode.
        part: The layer, or that it is a backward pass; may be empty.
    """

    code: CodeType
    instruction: int
    part: str = ""

    def __str__(self) -> str:
        line = next(
            line for start, end, line in self.code.co_lines() if start <= self.instruction < end
        )
        return f"{self.code.co_filename}:{line}{self.part}"


def source_line(is_backward: bool | None = None) -> SourceLine:
    """Looks up the line of Python, outside torch, shardcore and conversions, that runs now.

    Args:
        is_backward: Whether a backward pass runs; None to find out.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - the name is documented, for uses like this one
    while frame.f_back is not None and _is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    part = ""
    if layer := layer_scope.now():
        part = f", in layer {layer!r}"
    elif torch_private.backward_pass() >= 0 if is_backward is None else is_backward:
        part = ", in a backward pass"
    return SourceLine(frame.f_code, frame.f_lasti, part)


@cache
def _is_skipped(file: str) -> bool:
    return file.startswith(_PACKAGES) or file.endswith(_CONVERSIONS)
