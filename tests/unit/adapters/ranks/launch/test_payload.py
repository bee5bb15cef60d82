"""Functions and data on their way to new interpreters."""

import linecache
import os

import numpy as np
import pytest
import torch

from shardcore.adapters.ranks.launch import payload
from shardcore.domain.errors import EnvironmentProblem


@pytest.fixture
def sent(monkeypatch, tmp_path):
    """Writes values, of which those of 1,000 bytes are large, and reads them again."""
    monkeypatch.setattr(payload, "LARGE", 1000)

    def send(*values, **rules):
        written = payload.write(tmp_path, values, payload.Rules(**rules))
        return written, payload.read(tmp_path, written)

    return send


def test_large_arrays_are_in_the_other_file(sent, tmp_path):
    x = np.arange(1000.0)
    columns = x.reshape(100, 10)[:, :5]
    written, (first, again, half, small) = sent(x, x, columns, x[:5])
    assert written.sizes == (8000, 4000)
    assert os.path.getsize(tmp_path / "arrays") == 3 * payload._PAGE
    assert os.path.getsize(tmp_path / "body.pickle") < 2000
    assert first is again
    for given, read in ((x, first), (columns, half), (x[:5], small)):
        np.testing.assert_array_equal(read, given)
    first[0] = -1
    assert payload.read(tmp_path, written)[0][0] == 0  # of this reader alone


def test_large_tensors_share_the_memory_that_they_shared(sent):
    base = torch.arange(1000, dtype=torch.bfloat16)
    weight = torch.ones(500, requires_grad=True)
    (written, (flat, matrix, read)) = sent(base, base.reshape(100, 10)[3:, ::2], weight)
    assert written.sizes == (2000, 2000)
    torch.testing.assert_close(flat, base)
    torch.testing.assert_close(matrix, base.reshape(100, 10)[3:, ::2])
    matrix[0, 0] = -1
    assert flat[30] == -1
    assert base[30] == 30
    assert read.requires_grad


def test_a_function_of_a_cell_keeps_its_file_and_its_lines(sent, monkeypatch):
    lines = ["def outer():\n", "    return lambda: 1 / 0\n"]
    monkeypatch.setitem(linecache.cache, "cell 7", (40, None, lines, "cell 7"))
    names = {"__name__": "__main__"}
    exec(compile("".join(lines), "cell 7", "exec"), names)
    written, (outer,) = sent(names["outer"])
    assert outer is not names["outer"]
    assert outer().__code__.co_filename == "cell 7"
    assert written.lines == {"cell 7": (38, None, lines, "cell 7")}


class OfGpu(torch.Tensor):
    """A tensor that says it is of a GPU."""

    device = torch.device("cuda:0")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_a_tensor_of_a_device_is_sent_from_the_host_or_not_at_all(sent):
    tensor = torch.ones(2).as_subclass(OfGpu)
    with pytest.raises(EnvironmentProblem, match="a tensor on device 'cuda:0'"):
        sent({"x": tensor})
    _, (read,) = sent({"x": tensor}, moves_tensors=True)
    assert read["x"].tolist() == [1, 1]


def test_what_the_rules_refuse_is_not_sent(sent):
    def why_not(value):
        return "an open file" if hasattr(value, "readline") else ""

    with open(os.devnull) as file, pytest.raises(EnvironmentProblem, match=r"^an open file. Close"):
        sent([file], why_not=why_not, remedy="Close it.")
