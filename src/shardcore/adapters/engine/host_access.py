"""Access to sharded tensors without an operator: arrays, numbers, texts, memory, DLPack and FSDP.

Methods of the tensor classes serve it or refuse it. Functions of torch are replaced while shardcore
is installed: on a sharded tensor torch's own end the process.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from shardcore.adapters.capture.recording.recorder import recording
from shardcore.adapters.engine.redistribution import full
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import refresh, replace_memory
from shardcore.adapters.torch_private import hides_subclasses
from shardcore.domain.errors import ShardedTensorError

_REMEDY = (
    "full_tensor() returns the full tensor, which all ranks call together; to_local() returns the "
    "shard of this rank"
)


def _refusing(name: str) -> Callable[..., Any]:
    """Makes a method that refuses access to memory, which a sharded tensor does not have.

    Torch's own code compares addresses, for instance those of the weights of a GRU: it gets that of
    a tensor without memory, 0. `share_memory_` would end the process.
    """
    method: Callable[..., Any] = getattr(torch.Tensor, name)
    is_safe = name != "share_memory_"

    def refuse(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        caller = _module_of_caller()
        if is_safe and caller.partition(".")[0] == "torch":
            return method(tensor, *args, **kwargs)
        raise ShardedTensorError(
            f"{name}() needs the memory of the full tensor, but a tensor of shape "
            f"{tensor.form.shape} in {tensor.form.layout} has none on one rank: {_REMEDY}."
        )

    refuse.__name__, refuse.__doc__ = name, f"Refuses: see torch.Tensor.{name}."
    return refuse


class HostAccess(ShardedTensor):
    """The methods of a sharded tensor that read or write it without an operator.

    All ranks call together those that return values, unless each rank has the full tensor.
    """

    @property
    def data(self) -> Any:
        """The tensor without its history; a new one replaces the memory, as on one device."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        replace_memory(self, value)

    def numpy(self, *, force: bool = False) -> Any:
        """Copies the full tensor into an array."""
        return self._read().numpy(force=force)

    def tolist(self) -> Any:
        """Copies the full tensor into a nest of lists."""
        return self._read().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Exports the full tensor for `from_dlpack` of other libraries."""
        value = self if self.requires_grad else self._read()  # torch refuses the first
        return torch.Tensor.__dlpack__(value, **options)

    def __format__(self, spec: str) -> str:
        """Formats a scalar as a number; other tensors as `print` shows them."""
        return object.__format__(self, spec) if self.ndim else self.item().__format__(spec)

    def remark(self) -> str:
        """Warns, after the local shard in the text of a tensor, that it may be misread.

        A text moves nothing between ranks: a debugger or an error of one rank may ask for it.
        """
        if not self.form.is_pending:
            return ""
        return " (one of the parts of its value on all ranks: full_tensor() reduces them)"

    def apply_(self, function: Callable[[Any], Any]) -> Any:
        """Replaces each number by what `function` returns for it; all ranks call it for each."""
        return self._overwrite(lambda value: value.apply_(function))

    def map_(self, other: torch.Tensor, function: Callable[[Any, Any], Any]) -> Any:
        """Replaces each number by what `function` returns for it and that of `other`."""
        plain = _plain(other)
        return self._overwrite(lambda value: value.map_(plain, function))

    def map2_(
        self, x: torch.Tensor, y: torch.Tensor, function: Callable[[Any, Any, Any], Any]
    ) -> Any:
        """Replaces each number by what `function` returns for it and those of `x` and `y`."""
        of_x, of_y = _plain(x), _plain(y)
        return self._overwrite(lambda value: value.map2_(of_x, of_y, function))

    def __float__(self) -> float:
        return torch.Tensor.__float__(self._readable())

    def __int__(self) -> int:
        return torch.Tensor.__int__(self._readable())

    def __index__(self) -> int:
        return torch.Tensor.__index__(self._readable())

    def __bool__(self) -> bool:
        return torch.Tensor.__bool__(self._readable())

    def __complex__(self) -> complex:
        return torch.Tensor.__complex__(self._readable())

    def _readable(self) -> torch.Tensor:
        """Takes the full tensor where no operator reaches us, so that its number can be read.

        `torch.tensor([loss, loss])` reads numbers with the dispatch to subclasses turned off.
        """
        if not hides_subclasses():
            return self
        if recorder := recording():
            recorder.read(self, "torch.tensor()")
        refresh(self)
        self.meet_to_read()
        return full(self)

    def _read(self) -> torch.Tensor:
        self.meet_to_read()
        return self.full_tensor().detach()

    def _overwrite(self, write: Callable[[torch.Tensor], Any]) -> Any:
        if recorder := recording():
            recorder.read(self, "a function of Python for each number")
        value = self._read().clone()
        write(value)
        return self.copy_(value)

    def __tensor_flatten__(self) -> Any:
        """Refuses to be traced: `torch.compile` would trace the operators of the full tensor."""
        raise ShardedTensorError(
            "torch.compile() cannot trace sharded tensors: compile the train step of the model by "
            "model.compile(..., jit_compile=True), or call the model without torch.compile()."
        )

    @staticmethod
    def __tensor_unflatten__(*parts: object) -> Any:
        """Is there so that torch asks `__tensor_flatten__` first."""
        raise AssertionError("no sharded tensor is flattened")

    # Libraries that find torch's functions for DLPack on a class would pass over `__dlpack__`.
    __dlpack_c_exchange_api__ = None
    const_data_ptr = _refusing("const_data_ptr")
    data_ptr = _refusing("data_ptr")
    share_memory_ = _refusing("share_memory_")
    storage = _refusing("storage")
    untyped_storage = _refusing("untyped_storage")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def _module_of_caller() -> str:
    """Looks up the module that has called the function that calls this one."""
    frame: Any = inspect.currentframe()
    return str(frame.f_back.f_back.f_globals.get("__name__", ""))


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
    replacements = {
        id(original): _with_original(original, call) for original, call in calls.items()
    }
    for module in _modules_of_users():
        if replacements.keys().isdisjoint(map(id, vars(module).values())):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in replacements:
                undo.callback(setattr, module, key, value)
                setattr(module, key, replacements[id(value)])


def _with_original(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: object, **options: object) -> Any:
        return call(original, *args, **options)

    return replacement


def _modules_of_users() -> Iterator[ModuleType]:
    """Yields the modules that may have imported a function of torch for a user.

    Of torch these are where users import the functions from; other libraries have thousands of
    modules without them. Other kinds of modules load what is asked for.
    """
    is_users: dict[str, bool] = {}  # by the name of a top package
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in is_users:
            is_users[top] = _is_of_user(top)
        if (is_users[top] or name in _MODULES_OF_TORCH) and type(module) is ModuleType:
            yield module


def _is_of_user(package: str) -> bool:
    if package in sys.stdlib_module_names or package == __name__.partition(".")[0]:
        return False
    module = sys.modules.get(package)
    # Looked up in the dict: a module may import others when it is asked for an attribute.
    file = str(vars(module).get("__file__")) if isinstance(module, ModuleType) else ""
    return "site-packages" not in file and "dist-packages" not in file
