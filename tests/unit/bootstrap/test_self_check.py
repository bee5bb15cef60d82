"""The self-check: which private names are looked up, where, and what is said of missing ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shardcore.bootstrap import self_check
from shardcore.domain.errors import EnvironmentProblem


class Holder:
    """A class with an attribute that only its objects have."""

    public = 1
    _annotated: int


@pytest.fixture(autouse=True)
def torch(monkeypatch, tmp_path):
    """A torch with few names, whose package `_inductor` is not loaded."""
    ops = SimpleNamespace(aten=SimpleNamespace(_copy=1), _c10d=SimpleNamespace(wait=1))
    root = ModuleType("torch")
    root.__path__ = [str(tmp_path)]
    root.ops, root.Tensor, root.distributed = ops, Holder, SimpleNamespace(_named=1)
    for name in [name for name in sys.modules if (name + ".").startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", root)
    package = tmp_path / "_inductor"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scheduler.py").write_text("raise ImportError\n\nclass Node:\n    inner = 1\n")
    yield
    sys.modules.pop("torch._inductor", None)


KINDS = {
    "operator": {"aten::_copy": {}, "_c10d::wait": {}, "_c10d": {}},
    "attribute": {"_annotated": {"of": ["torch.Tensor"]}, "torch.distributed._named": {}},
    "module": {"torch._inductor.scheduler": {}, "torch._inductor.scheduler.Node": {}},
}


def test_names_that_are_there_are_not_missing():
    assert list(self_check.missing(KINDS)) == []
    assert "torch._inductor.scheduler" not in sys.modules, "it takes seconds to import"


@pytest.mark.parametrize(
    ("kind", "name", "entry", "lost"),
    [
        ("operator", "aten::_moved", {}, "torch.ops.aten._moved"),
        ("operator", "_gone::wait", {}, "torch.ops._gone.wait"),
        ("c", "torch._C._gone", {}, "torch._C._gone"),
        ("attribute", "_gone", {"of": ["torch.Tensor"]}, "torch.Tensor._gone"),
        ("attribute", "public", {"of": ["torch.Gone"]}, "torch.Gone.public"),
        ("attribute", "torch.distributed._gone", {}, "torch.distributed._gone"),
        ("module", "torch._inductor.gone", {}, "torch._inductor.gone"),
        ("module", "torch._inductor.gone.Node", {}, "torch._inductor.gone.Node"),
        ("module", "torch._inductor.scheduler.Gone", {}, "torch._inductor.scheduler.Gone"),
    ],
)
def test_a_missing_name_is_named_with_its_holder(kind, name, entry, lost):
    assert list(self_check.missing({kind: {name: entry}})) == [lost]


def test_a_name_of_a_part_that_this_build_lacks_is_left_out():
    kinds = {"attribute": {"torch.distributed._gone": {"part": "torch.distributed"}}}
    assert list(self_check.missing(kinds, {"torch.distributed"})) == []
    assert list(self_check.missing(kinds, {"torch.distributed.tensor"})) != []


def test_what_does_not_fit_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(self_check, "problems", lambda: ["torch has no a", "Keras has no b"])
    with pytest.raises(EnvironmentProblem) as error:
        self_check.check(["torch 3.0 is new.", "Keras 4.0 is new."])
    assert str(error.value) == (
        "torch 3.0 is new. Keras 4.0 is new. The self-check found what does not fit: torch has no "
        "a; Keras has no b. Nothing was changed. Install a tested release, or look for a newer "
        "shardcore."
    )


def test_what_fits_is_no_error(monkeypatch):
    monkeypatch.setattr(self_check, "problems", list)
    self_check.check(["torch 3.0 is new."])
