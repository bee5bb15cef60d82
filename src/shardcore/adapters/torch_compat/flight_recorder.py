"""torch's flight recorder: it keeps the stack of each of the last 2,000 collectives.

torch 2.13: of a collective that the interpreter starts it keeps some eighty bytes more than of one
that Python starts. glibc takes them out of the middle of what a large tensor of a CPU left, where
no tensor of its size fits again: a step of a fully sharded model took 30 MB more each time.
"""

import json
import os
from typing import Any

import torch

SIZE = "TORCH_FR_BUFFER_SIZE"


def leave_off() -> None:
    """A group of CPUs that is about to be made keeps none, unless the user has asked for some."""
    os.environ.setdefault(SIZE, "0")


def is_on() -> bool:
    """Whether any is kept of the collectives of CPUs that this process has started.

    torch reads the variable once, at the first collective. One that cannot be asked may keep some.
    """
    told: Any = torch._C._distributed_c10d
    dump = getattr(told, "_dump_fr_trace_json", None)
    if dump is None:
        return True
    return bool(json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries"))
