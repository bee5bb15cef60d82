"""The index of a checkpoint: what it refuses, and that it is read as it was written."""

import json

import pytest

from shardcore.domain.checkpoints.contents import VariableToLoad, match
from shardcore.domain.checkpoints.grid import Grid
from shardcore.domain.checkpoints.index import Index, StoredFile, StoredVariable, index_from
from shardcore.domain.checkpoints.index import _digest as digest
from shardcore.domain.errors import CheckpointError

FILES = (StoredFile("rank-00000.safetensors", 500, "0" * 64),)


def variable(name="layers/dense/vars/0", path="net/dense/kernel", shape=(4, 6), **fields):
    given = {"group": "model", "dtype": "float32", "layout": "(None, None)", "files": (0, 0)}
    return StoredVariable(name=name, path=path, grid=Grid(shape, ((0, 2), (0,))), **given | fields)


INDEX = Index(7, "(data=2)", {"keras": "3.15.1"}, (variable(),), FILES, {"user": {"epoch": 2}})


def test_an_index_is_read_as_it_was_written():
    assert index_from(INDEX.to_text().encode()) == INDEX
    assert INDEX.nbytes == 96


def edited(change):
    """The text of an index with a change of its content, and a checksum that fits."""
    found = json.loads(INDEX.to_text())
    change(found["content"])
    found["sha256"] = digest(found["content"])
    return json.dumps(found)


CHANGES = {
    "negative step": (lambda c: c.update(step=-1), "step of at least 0"),
    "bool as step": (lambda c: c.update(step=True), "Expected int as 'step'"),
    "further field": (lambda c: c.update(other=1), "Expected the fields"),
    "variable twice": (lambda c: c["variables"].append(c["variables"][0]), "variable .* twice"),
    "file twice": (lambda c: c["files"].append(c["files"][0]), "file .* twice"),
    "too few files": (lambda c: c["variables"][0].update(files=[0]), "2 pieces, but 1 files"),
    "unknown file": (lambda c: c["variables"][0].update(files=[0, 1]), "the index has not"),
    "cut at the end": (
        lambda c: c["variables"][0].update(cuts=[[0, 4], [0]]),
        "ascending beginnings",
    ),
    "cut late": (lambda c: c["variables"][0].update(cuts=[[1, 2], [0]]), "ascending beginnings"),
    "negative size": (lambda c: c["variables"][0].update(shape=[-4, 6]), "ascending beginnings"),
    "huge shape": (
        lambda c: c["variables"][0].update(shape=[2**60, 6]),
        "more bytes than",
    ),
    "unknown dtype": (lambda c: c["variables"][0].update(dtype="float31"), "unknown dtype"),
    "real size": (lambda c: c["variables"][0].update(shape=[4.0, 6]), "lists of numbers"),
    "name above": (lambda c: c["files"][0].update(name="../other.safetensors"), "no name"),
    "absolute name": (lambda c: c["files"][0].update(name="/etc/passwd"), "no name"),
    "name of a pickle": (lambda c: c["files"][0].update(name="rank-00000.pickle"), "no name"),
    "negative file size": (lambda c: c["files"][0].update(size=-1), "no size"),
    "no checksum": (lambda c: c["files"][0].update(sha256="x"), "no checksum"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_index_that_cannot_be_is_refused(name):
    change, message = CHANGES[name]
    with pytest.raises(CheckpointError, match=message):
        index_from(edited(change).encode())


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1}', "[" * 100_000, "1" * 5000], ids=list("abcdef")
)
def test_a_text_that_is_no_index_is_refused(text):
    with pytest.raises(CheckpointError):
        index_from(text.encode())


def test_a_changed_number_is_seen():
    with pytest.raises(CheckpointError, match="changed after it was written"):
        index_from(INDEX.to_text().replace('"step": 7', '"step": 8').encode())


def test_a_state_that_is_no_json_is_refused():
    with pytest.raises(CheckpointError, match="is no JSON"):
        Index(1, "", {}, (), (), {"user": {"model": object()}})


def wanted(name="layers/dense/vars/0", path="net/dense/kernel", shape=(4, 6), group="model"):
    return VariableToLoad(name, path, group, shape, "float32")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([wanted(shape=(4, 5))], r"'layers/dense/vars/0' \(net/dense/kernel\) has shape \(4, 5\)"),
        ([wanted(path="net/other/kernel")], "is 'net/dense/kernel' in the checkpoint"),
        ([wanted(), wanted("layers/dense/vars/1")], "'layers/dense/vars/1'.*is not in the check"),
        ([], "is not in the model"),
    ],
)
def test_another_model_is_refused_with_the_names_of_its_variables(variables, message):
    with pytest.raises(CheckpointError, match=message):
        match(variables, [variable()], ()).check("step-1")


def test_numbers_of_names_and_optional_groups_do_not_matter():
    metric = variable("metrics/0", "loss/total", group="metrics")
    found = match(
        [wanted(path="net_2/dense_11/kernel"), wanted("metrics/1", "acc/count", group="metrics")],
        [variable(), metric],
        ("metrics",),
    )
    found.check("step-1")
    assert list(found.pairs) == ["layers/dense/vars/0"]
    assert found.optional == ("'metrics/0' (loss/total)",)
