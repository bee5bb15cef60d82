"""Functions of torch that take a tensor or a module past all operators.

They are replaced while shardcore is installed: on a sharded tensor torch's own end the process.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.domain.errors import ShardedTensorError

# The modules of torch from which users import the functions.
_MODULES_OF_TORCH = frozenset({"torch", "torch.utils.dlpack", "torch.distributed.fsdp"})


def replace_functions() -> Callable[[], None]:
    """Replaces the functions; what is returned restores them."""
    with ExitStack() as undo:
        _replace_data(undo)
        calls: dict[Callable[..., Any], Callable[..., Any]] = {
            torch.to_dlpack: _to_dlpack  # type: ignore[attr-defined]
        }
        with contextlib.suppress(ImportError):  # without DTensor there is no FSDP either
            from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

            calls[fully_shard] = _fully_shard
            of_class: Any = FullyShardedDataParallel
            undo.callback(setattr, of_class, "__init__", of_class.__init__)
            of_class.__init__ = _with_original(of_class.__init__, _init_fsdp)
        _replace(calls, undo)
        return undo.pop_all().close


def _replace_data(undo: ExitStack) -> None:
    """Has `plain.data = sharded` raise, for all classes of tensors but our own."""
    original: Any = torch.Tensor.data

    def set_data(tensor: torch.Tensor, value: Any) -> None:
        if isinstance(value, ShardedTensor) and not isinstance(tensor, ShardedTensor):
            raise ShardedTensorError(
                f"x.data = value got a sharded value of shape {value.form.shape} in "
                f"{value.form.layout} for an x that is not sharded, which cannot share its memory: "
                "write x.data.copy_(value), or x.data = value.full_tensor(), which all ranks call "
                "together, or value.to_local() for the shard of this rank."
            )
        original.__set__(tensor, value)

    torch_tensor: Any = torch.Tensor
    if "data" in vars(torch.Tensor):
        undo.callback(setattr, torch.Tensor, "data", original)
    else:  # torch's is in the base class
        undo.callback(delattr, torch.Tensor, "data")
    torch_tensor.data = property(original.__get__, set_data, doc=original.__doc__)


def _to_dlpack(original: Callable[..., Any], tensor: Any, *args: object, **options: object) -> Any:
    """Exports the full tensor to other libraries, as `__dlpack__` does."""
    if isinstance(tensor, ShardedTensor):
        tensor.meet_to_read()
        tensor = tensor.full_tensor().detach()
    return original(tensor, *args, **options)


def _fully_shard(
    original: Callable[..., Any], module: Any, *args: object, **options: object
) -> Any:
    _refuse_sharded(module, "fully_shard()")
    return original(module, *args, **options)


def _init_fsdp(
    original: Callable[..., Any], wrapper: object, module: Any, *args: object, **options: object
) -> None:
    _refuse_sharded(module, "FullyShardedDataParallel()")
    original(wrapper, module, *args, **options)


def _refuse_sharded(module: Any, call: str) -> None:
    """Refuses modules with sharded parameters or buffers."""
    for part in module if isinstance(module, list | tuple) else [module]:
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            if isinstance(tensor, ShardedTensor):
                raise ShardedTensorError(
                    f"{call} expected a module of plain tensors, and {name!r} of "
                    f"{type(part).__name__} is sharded already, in {tensor.form.layout}. A model "
                    "under keras.distribution needs no FSDP: shardcore.plan(model, mesh, "
                    "policy='fully_sharded') is the layout map that shards every variable.",
                    name=name,
                )


def _replace(calls: dict[Callable[..., Any], Callable[..., Any]], undo: ExitStack) -> None:
    """Replaces functions by calls that get them: in torch, and in modules of the user."""
    replacements = {
        id(original): _with_original(original, call) for original, call in calls.items()
    }
    for module in list(sys.modules.values()):
        # Other kinds of modules load what is asked for. Of torch `to_dlpack` and `fully_shard` are
        # where users import them from; other libraries have thousands of modules without them.
        if type(module) is not ModuleType or not _may_have_imported(module):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                undo.callback(setattr, module, name, value)
                setattr(module, name, replacements[id(value)])


def _with_original(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `call`, which gets the original as its first argument."""

    @functools.wraps(original)
    def replacement(*args: object, **options: object) -> Any:
        return call(original, *args, **options)

    return replacement


def _may_have_imported(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    is_of_library = "site-packages" in file or "dist-packages" in file or file == __file__
    return module.__name__ in _MODULES_OF_TORCH or not is_of_library
