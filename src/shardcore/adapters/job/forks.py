"""Processes forked from this one: whether they could compute with CUDA, and run backward passes.

torch refuses both after the parent has used them: CUDA once the parent has asked for devices, as
the import of Keras does; a backward pass once the parent has run one on a host with a GPU.
"""

import os
import select
import signal
import sys
import warnings
from typing import NoReturn

# The seconds in which a forked process answers.
_SECONDS = 20.0
_YES, _NO = b"y", b"n"
# torch 2.10 to 2.15 says so, and has no public name by which to ask.
_OF_A_FORK = "forked subprocess"


def has_devices() -> bool:
    """Returns whether torch is loaded and sees an accelerator, such as a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.accelerator.is_available())


def can_compute() -> bool:
    """Returns whether a process that is forked now can use what torch uses in this one.

    torch has no name by which a parent can ask. So a process is forked, and tries.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.accelerator.current_accelerator(check_available=False) is None:
        return True  # it has used no device, and knows none
    has_cuda = torch.cuda.is_available()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forking beside threads: that is what is tried.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _answer(writer, has_cuda)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], _SECONDS)
        return bool(ready) and os.read(reader, 1) == _YES
    finally:
        os.close(reader)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _answer(writer: int, has_cuda: bool) -> NoReturn:
    """Writes whether this process, which is forked, can compute; and ends it."""
    try:
        # A device is not to be started for it, nor a thread of autograd for each device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        is_refused = (has_cuda and _refuses_cuda()) or _refuses_backward() or _is_refused_again()
        os.write(writer, _NO if is_refused else _YES)
    finally:
        os._exit(0)


def _refuses_cuda() -> bool:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - of no device, which is as asked
        return _OF_A_FORK in str(error)
    return False


def _is_refused_again() -> bool:
    """Returns whether a process that is forked from this one could run no backward pass.

    A build of torch for CUDA counts devices that are not there once there were tensors without
    values, as `torch.compile` has them: then the pass before has started threads for them.
    """
    process = os.fork()
    if process == 0:
        os._exit(int(_refuses_backward()))
    return os.waitpid(process, 0)[1] != 0


def _refuses_backward() -> bool:
    import torch

    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))
    except RuntimeError:  # of autograd's threads, which do not survive a fork
        return True
    return False
