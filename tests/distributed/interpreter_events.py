"""Counts what the Python of a step does by events of the interpreter.

A step that changed a variable of Python would not be captured. A hook is called for each event of
its process, `id()` among them, and stays: a process has one from when it first counts.
"""

import sys

_followed: set[str] = set()


def follow(event: str, noted: list[object]) -> None:
    """Adds the arguments of each `sys.audit(event, ...)` to `noted` from now on."""
    if event not in _followed:
        _followed.add(event)
        sys.addaudithook(lambda name, args: noted.append(args) if name == event else None)
