"""Functions and data on their way to new interpreters; large arrays go by a file.

cloudpickle sends the functions and classes of `__main__`, such as those of a notebook's cells, by
their code, and those of modules by their names. Arrays of 64 MB and more are in a separate
file, once. Each rank maps it: their pages are shared until a rank writes into one.
"""

import builtins
import io
import linecache
import mmap
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import attrs
import cloudpickle

from shardcore.domain.errors import EnvironmentProblem, describe_error

if TYPE_CHECKING:  # a process that has loaded none of them has nothing of theirs to send
    import numpy
    import torch

LARGE = 64 * 2**20  # bytes
_PAGE = mmap.ALLOCATIONGRANULARITY
_BODY, _ARRAYS = "body.pickle", "arrays"


@attrs.frozen
class Rules:
    """Rules for what may be sent.

    Args:
        why_not: Returns what a value is that may not be sent; nothing of others.
        remedy: What to do about such a value.
        moves_tensors: Whether a tensor on a device is sent as one on the host.
    """

    why_not: Callable[[object], str] = lambda value: ""
    remedy: str = ""
    moves_tensors: bool = False


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles into `file`; notes large arrays, and the lines of functions that no file has."""

    def __init__(self, file: Any, rules: Rules) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._is_small)
        self.large: list[memoryview] = []
        self.lines: dict[str, Any] = {}
        self._rules = rules
        self._storages: dict[int, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        """Refuses by the rules; sends tensors in other ways than torch pickles them."""
        problem = self._rules.why_not(value)
        if problem:
            raise EnvironmentProblem(f"{problem}. {self._rules.remedy}")
        if isinstance(value, CodeType):
            return self._of_code(value)
        if _is_tensor(value) and value.device.type not in ("cpu", "meta"):
            return self._of_device(value)
        if _is_tensor(value) and _is_large(value):
            return self._of_storage(value)
        if _is_scattered(value):
            return sys.modules["numpy"].ascontiguousarray(value).__reduce_ex__(5)
        return super().reducer_override(value)

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE:
            self.large.append(raw)
        return raw.nbytes < LARGE

    def _of_code(self, code: CodeType) -> Any:
        """Keeps the file of the code, and its lines if it is a cell: for tracebacks, and sources.

        cloudpickle gives all code that it sends the same name in place of the file.
        """
        file = code.co_filename
        lines = linecache.getlines(file)
        if lines and not Path(file).exists():
            self.lines[file] = (sum(map(len, lines)), None, lines, file)
        return _code, (file, *self.dispatch_table[CodeType](code))

    def _of_device(self, tensor: "torch.Tensor") -> Any:
        if self._rules.moves_tensors:
            return _itself, (tensor.detach().cpu(),)
        raise EnvironmentProblem(
            f"a tensor on device {str(tensor.device)!r}, which belongs to this process. Send its "
            "values: keras.ops.convert_to_numpy(tensor), or tensor.cpu().",
            got=str(tensor.device),
        )

    def _of_storage(self, tensor: "torch.Tensor") -> Any:
        import torch

        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = flat.numpy()
        geometry = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        flat = self._storages[storage.data_ptr()]
        return _tensor, (flat, tensor.dtype, geometry, tensor.requires_grad)


def _is_tensor(value: object) -> TypeGuard["torch.Tensor"]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_large(tensor: "torch.Tensor") -> bool:
    import torch

    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.untyped_storage().nbytes() >= LARGE


def _is_scattered(value: Any) -> TypeGuard["numpy.ndarray[Any, Any]"]:
    """Tells whether it is a large array whose elements are not one block of memory."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.nbytes < LARGE:
        return False
    return not (value.flags.c_contiguous or value.flags.f_contiguous or value.dtype.hasobject)


def _tensor(flat: Any, dtype: Any, geometry: tuple[Any, ...], needs_grad: bool) -> Any:
    import torch

    storage = torch.from_numpy(flat).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, *geometry)
    return tensor.requires_grad_(needs_grad)


def _code(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _itself(value: object) -> object:
    return value


@attrs.frozen
class Written:
    """Facts that a reader needs before it reads.

    Args:
        sizes: The bytes of each large array.
        lines: The lines of functions that no file has, as `linecache` keeps them.
    """

    sizes: tuple[int, ...]
    lines: dict[str, Any]


def write(folder: Path, values: Sequence[Any], rules: Rules) -> Written:
    """Writes values for `read`, their large arrays in a separate file.

    Args:
        folder: A folder of this call.
        values: The values. What they share, such as a class, they share when they are read.
        rules: What may be sent.

    Raises:
        EnvironmentProblem: If something may not be sent. What a value itself raises is raised.
    """
    with (folder / _BODY).open("wb") as file:
        packer = _Packer(file, rules)
        packer.dump(list(values))
    with (folder / _ARRAYS).open("wb") as file:
        for buffer in packer.large:
            file.write(buffer)
            file.write(bytes(-buffer.nbytes % _PAGE))
    return Written(tuple(buffer.nbytes for buffer in packer.large), packer.lines)


def check(value: object, rules: Rules) -> None:
    """Raises what `write` raises of a value, and writes nothing."""
    _Packer(io.BytesIO(), rules).dump(value)


def read(folder: Path, written: Written) -> list[Any]:
    """Reads the values that `write` wrote. Large arrays are mapped, and may be written into."""
    linecache.cache.update(written.lines)
    with (folder / _BODY).open("rb") as body, (folder / _ARRAYS).open("rb") as arrays:
        values: list[Any] = pickle.load(body, buffers=_mapped(arrays.fileno(), written.sizes))
        return values


def _mapped(file: int, sizes: Iterable[int]) -> Iterator[memoryview]:
    """Yields the large arrays. What this process writes into them stays in it."""
    begin = 0
    for size in sizes:
        yield memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY, offset=begin))
        begin += size + -size % _PAGE


def not_sent(
    call: str, values: dict[str, Any], rules: Rules, error: Exception
) -> EnvironmentProblem:
    """Builds the error of a call whose values cannot be sent. It names the variable.

    Args:
        call: The call, such as "launch()".
        values: Each value by the words for it.
        rules: What may be sent.
        error: The error that the values have raised.
    """
    words = next(_first(values.items(), rules), "a value")
    is_known = isinstance(error, EnvironmentProblem)
    problem = (
        str(error) if is_known else f"what cannot be pickled ({describe_error(error)}). {_REMEDY}"
    )
    return EnvironmentProblem(
        f"{call} starts new processes and sends them the function and all that it reads, but "
        f"{words} holds {problem}"
    )


_REMEDY = "Make it in the function."


def _first(values: Any, rules: Rules) -> Iterator[str]:
    for words, value in values:
        if not _can_be_sent(value, rules):
            yield _innermost(words, value, rules, {id(value)})
            return


def _innermost(words: str, value: Any, rules: Rules, seen: set[int]) -> str:
    """Names the variable of a function which holds what cannot be sent."""
    for function in _functions(value):
        for name, held in _variables_of(function):
            if id(held) not in seen and not _can_be_sent(held, rules):
                inner = f"variable {name!r}, which {function.__name__}() reads,"
                return _innermost(inner, held, rules, seen | {id(held)})
    return words


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yields a function itself, that of a method or of a partial call, the methods of a class."""
    for candidate in (value, getattr(value, "func", None), getattr(value, "__func__", None)):
        if isinstance(candidate, FunctionType):
            yield candidate
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "__main__":
        yield from (method for method in vars(kind).values() if isinstance(method, FunctionType))


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty: an inner function that is not defined yet
            continue
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__ and not hasattr(builtins, name):
            yield name, function.__globals__[name]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _can_be_sent(value: object, rules: Rules) -> bool:
    try:
        check(value, rules)
    except Exception:  # noqa: BLE001 - whatever the user's value raises
        return False
    return True


def arguments_of(function: Callable[..., object], arguments: tuple[object, ...]) -> dict[str, Any]:
    """Labels the arguments of a call by the words for them: "argument 'epochs'"."""
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    labels = [repr(name) for name in names] + [str(n) for n in range(len(names), len(arguments))]
    return {f"argument {label}": value for label, value in zip(labels, arguments, strict=False)}
