"""The program that compares two GPUs with one, at a small size on CPUs over gloo."""

import json

import attrs
import pytest

from tests import warm
from tests.gpu.two import Run, problems


def test_two_devices_have_the_losses_of_one(tmp_path):
    done = warm.run(["-m", "tests.gpu.two", str(tmp_path / "two.json"), "--small"])
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "two.json").read_text())
    assert found["failed"] == []
    layouts = [run["layout"] for run in found["runs"]]
    assert layouts == ["one device", "data parallel", "tensor parallel"]
    one, *others = found["runs"]
    assert one["losses"][0] > one["losses"][-1]
    for run in others:
        assert run["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert run["beside one"] == one["seconds"] / run["seconds"]


def test_other_losses_are_found():
    one = Run("one device", "cpu", [2.0, 1.0], 0.1)
    same = attrs.evolve(one, layout="data parallel", losses=[2.0, 1.0001])
    assert problems(one, [same, same]) == []
    other = attrs.evolve(same, losses=[2.0, 1.01])
    assert problems(one, [same, other]) == ["data parallel: rank 1 has other losses than rank 0"]
    assert problems(one, [other, other])[0].startswith("data parallel: losses [2.0, 1.01], on one")
