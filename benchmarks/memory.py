"""The memory of a process, as the kernel counts it.

Resident memory covers what no count of tensors sees: buckets of DDP, buffers of compiled graphs,
workspaces. It also covers what the C library keeps of freed blocks, where that is not prevented:
the holes of earlier steps are filled again, each by what fits, and count until the process ends.
"""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = "5"
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE = 1 << 16

_at_start = 0


def map_large_blocks() -> None:
    """Makes every large block a separate mapping from here on, which is unmapped as it is freed.

    To be called before anything large is made: free memory of the heap is taken first.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def begin() -> None:
    """Count the growth of this process from here on: all libraries are imported, nothing built."""
    global _at_start  # noqa: PLW0603 - a fact of the process
    _give_back()
    _at_start = _resident("VmRSS")


def peak(step: Callable[[], Any]) -> dict[str, int]:
    """The memory of `step`: above the resident memory before it, and above the beginning."""
    _give_back()
    CLEAR.write_text(_FORGET_THE_PEAK)
    before = _resident("VmRSS")
    step()
    highest = _resident("VmHWM")
    return {"step": highest - before, "process": highest - _at_start}


def storage_bytes(tensor: Any) -> int:
    """The bytes that this rank's memory holds of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().nbytes()


def _give_back() -> None:
    """Returns free memory to the system; else it would count as resident before the step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
