"""Functions and data on their way to new interpreters; large arrays go by a file.

cloudpickle sends the functions and classes of `__main__`, such as those of a notebook's cells, by
their code, and those of modules by their names. Arrays of 64 MB and more are in a separate
file, once. Each rank maps it: their pages are shared until a rank writes into one.
"""

import io
import linecache
import mmap
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeGuard

import attrs
import cloudpickle

from shardcore.domain.errors import EnvironmentProblem

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
        """Returns how `value` is pickled: see `pickle.Pickler`."""
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
            "values: keras.ops.convert_to_numpy(tensor), or tensor.cpu()."
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
    """Returns whether it is a large array whose elements are not one block of memory."""
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
    """Returns the values that `write` wrote. Large arrays are mapped, and may be written into."""
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
