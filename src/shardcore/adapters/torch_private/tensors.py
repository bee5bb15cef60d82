"""Tensor subclasses, autograd nodes, hooks of modules, identities of memory and generators."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch

# Without it, torch wraps every result of an operator in the subclass again.
NO_TORCH_FUNCTION: Any = torch.nn.Parameter.__torch_function__
# The kinds of hooks that run in the passes of a module.
_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def wrapper(
    cls: type[torch.Tensor],
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Makes a tensor of the class `cls` without memory.

    torch 2.13: `_make_wrapper_subclass` is how the documentation of torch extends tensors, and has
    no public name.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=strides, dtype=dtype, device=device
    )


def set_metadata(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Sets shape, strides and dtype of `tensor` to those of `other`, of its class.

    torch 2.13: of a tensor without memory this is all that `tensor.data = other` does. A subclass
    that replaces `data` reaches torch's by the descriptor.
    """
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]


def hides_subclasses() -> bool:
    """Tells whether operators on this thread now pass over `__torch_dispatch__`.

    torch 2.13: `torch.tensor([x])` reads the numbers of tensors so, and nothing public tells.
    """
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch.DispatchKey.Python)


def backward_pass() -> int:
    """Reads the number of the backward pass that runs on this thread; -1 outside of one.

    torch 2.13: it has no public name. A pass that fails calls nothing at its end.
    """
    return int(torch._C._current_graph_task_id())


def count_nodes() -> int:
    """Counts the autograd nodes of this thread; the next node gets this number.

    torch 2.13: the number has no public name.
    """
    autograd: Any = torch.autograd
    return int(autograd._get_sequence_nr())


def current_node() -> int | None:
    """Reads the number of the node that runs on this thread; None outside, and for a leaf.

    torch 2.13: neither the node nor its number has a public name. The node that accumulates the
    gradient of a leaf has the largest number there is.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None or accumulating_leaf() is not None:
        return None
    return int(node._sequence_nr())


def accumulating_leaf() -> torch.Tensor | None:
    """Finds the leaf whose gradient is accumulated on this thread now, None without one.

    torch 2.13: as for `current_node`.
    """
    leaf: torch.Tensor | None = getattr(torch._C._current_autograd_node(), "variable", None)
    return leaf


def after_backward(call: Callable[[], None]) -> None:
    """Registers `call` for the end of the backward pass that runs now.

    torch 2.13: the engine has no public name. `DistributedDataParallel` ends its passes so.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def version_of(tensor: torch.Tensor) -> int:
    """Counts the writes into the memory of `tensor` that torch has seen.

    torch 2.13: `_version` has no public name. A tensor made in inference mode has none.
    """
    return 0 if tensor.is_inference() else tensor._version


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Lists the hooks that `module` calls in its forward and backward pass.

    torch 2.10 to 2.15: public names register hooks, but do not list them. A module keeps each kind
    in a dict, under a name that ends with the kind.
    """
    registries = (hooks for name, hooks in vars(module).items() if name.endswith(_HOOKS))
    return [hook for hooks in registries if isinstance(hooks, dict) for hook in hooks.values()]


def hook_registries() -> list[dict[int, Any]]:
    """Lists the dicts of the hooks that all torch modules call.

    torch 2.10 to 2.15: as for `hooks_of`, they are variables of the module that defines `Module`.
    """
    variables = vars(torch.nn.modules.module).items()
    return [hooks for name, hooks in variables if name.endswith(_HOOKS) and isinstance(hooks, dict)]


# Reads what changes of a tensor without an operator: whether it has a gradient, its hooks, and
# those that run after its gradient is accumulated. By C alone, since guards read hundreds.
METADATA_OF: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter(
    "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"
)


# Numbers the states of a dict, which no public name of Python does (torch 2.13). Do not ask it of
# an empty dict: when another updates that, Python 3.12 and later do not tell torch's watcher.
DICT_VERSION: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version


def identity_of(generator: torch.Generator) -> int:
    """Identifies the generator while it exists.

    torch 2.13: an operator gets a new Python object for a generator.
    """
    return int(generator._cdata)  # type: ignore[attr-defined]


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of `tensor` while a tensor has it.

    torch 2.13: there is no public name for the identity of a storage without its address, which
    tensors of no elements share.
    """
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _some_dtensor() -> Iterator[None]:
    """Opens a context in which torch finds a class DTensor, also where it has none.

    torch 2.13 imports the class for the first operator on a tensor subclass, and keeps it. Without
    the class, no operator on a tensor subclass would run.
    """
    name = "torch.distributed.tensor"
    try:
        importlib.import_module(name)
    except ImportError:
        stand_in: Any = ModuleType(name)
        stand_in.DTensor = type("DTensor", (), {})
        before = {name: sys.modules[name]} if name in sys.modules else {}
        sys.modules[name] = stand_in
        yield
        del sys.modules[name]
        sys.modules.update(before)
    else:
        yield


def find_dtensor() -> None:
    """Lets torch look for the class DTensor."""
    with _some_dtensor():
        torch.ops.aten.detach.default(
            wrapper(_Probe, (1,), (1,), torch.float32, torch.device("cpu"))
        )


class _Probe(torch.Tensor):
    __torch_function__ = NO_TORCH_FUNCTION

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros(1)
