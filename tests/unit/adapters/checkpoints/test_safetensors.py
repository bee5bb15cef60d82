"""Files of checkpoints: the package `safetensors` reads them, and damaged ones are refused."""

import hashlib
import json
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardcore.adapters.checkpoints.safetensors import open_file, write
from shardcore.domain.checkpoints.file_format import DTYPES, header_of
from shardcore.domain.checkpoints.grid import Box
from shardcore.domain.errors import CheckpointError

TENSORS = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES} | {
    "no dims": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy()


def dtype_of(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def written(path, tensors):
    described = [(key, dtype_of(each), tuple(each.shape)) for key, each in tensors.items()]
    return write(path, header_of(described), [raw(each).data for each in tensors.values()])


def test_the_package_reads_what_is_written(tmp_path):
    file = written(tmp_path / "a.safetensors", TENSORS)
    content = (tmp_path / "a.safetensors").read_bytes()
    assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        np.testing.assert_array_equal(raw(found[name]), raw(tensor))


def test_what_the_package_writes_is_read(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "a.safetensors", {"made": "by the package"})
    with open_file(tmp_path / "a.safetensors") as file:
        for name, tensor in TENSORS.items():
            shape = tuple(tensor.shape)
            entry = file.entry(name, dtype_of(tensor), shape)
            target = bytearray(tensor.nbytes)
            whole = Box((0,) * len(shape), shape)
            assert file.read(entry, whole, memoryview(target), shape, whole) == tensor.nbytes
            assert bytes(target) == raw(tensor).tobytes()


@st.composite
def slices_of(draw, size):
    start = draw(st.integers(0, size - 1))
    return start, draw(st.integers(1, size - start))


@given(st.tuples(slices_of(5), slices_of(4), slices_of(3)))
def test_a_slice_is_read_and_no_other_byte(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    value = np.arange(60, dtype="float32").reshape(5, 4, 3)
    if not path.exists():
        safetensors.torch.save_file({"a": torch.from_numpy(value)}, path)
    start, shape = zip(*parts, strict=True)
    part, found = Box(start, shape), np.zeros(shape, "float32")
    with open_file(path) as file:
        entry = file.entry("a", "float32", (5, 4, 3))
        target = memoryview(found.reshape(-1).view("uint8"))
        count = file.read(entry, part, target, shape, Box((0, 0, 0), shape))
    assert count == found.nbytes
    np.testing.assert_array_equal(found, value[part.slices])


def header(content):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def entry(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DAMAGED = {
    "empty": b"",
    "no header": (2**62).to_bytes(8, "little"),
    "no json": header(b"\xff{") + bytes(8),
    "list": header([1]) + bytes(8),
    "deep": header(b"[" * 100_000),
    "cut": header({"a": entry()}) + bytes(7),
    "longer": header({"a": entry()}) + bytes(9),
    "gap": header({"a": entry(4, 12)}) + bytes(12),
    "overlap": header({"a": entry(), "b": entry(4, 12)}) + bytes(12),
    "other bytes": header({"a": entry(0, 4)}) + bytes(4),
    "negative": header({"a": entry(shape=(-2,))}) + bytes(8),
    "unknown dtype": header({"a": entry(dtype="F31")}) + bytes(8),
    "no shape": header({"a": {"dtype": "F32"}}) + bytes(8),
    "text as number": header({"a": entry(begin="0")}) + bytes(8),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[name])
    with (
        pytest.raises(CheckpointError, match=r"a.safetensors' is no safetensors file"),
        open_file(tmp_path / "a.safetensors"),
    ):
        pass


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    written(path, {"a": torch.arange(6.0)})
    with open_file(path) as file:
        os.truncate(path, path.stat().st_size - 4)
        whole = Box((0,), (6,))
        with pytest.raises(CheckpointError, match="it is cut"):
            file.read(
                file.entry("a", "float32", (6,)), whole, memoryview(bytearray(24)), (6,), whole
            )


def test_another_tensor_than_the_index_says_is_an_error(tmp_path):
    written(tmp_path / "a.safetensors", {"a": torch.arange(6.0)})
    with open_file(tmp_path / "a.safetensors") as file:
        for key, dtype, shape in [
            ("b", "float32", (6,)),
            ("a", "int32", (6,)),
            ("a", "float32", (5,)),
        ]:
            with pytest.raises(CheckpointError, match="but has"):
                file.entry(key, dtype, shape)
