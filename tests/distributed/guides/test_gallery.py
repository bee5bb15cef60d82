"""The programs of the gallery: their losses on two ranks are those of one device."""

import re
import runpy
import sys
from xml.etree import ElementTree

import attrs
import numpy as np
import pytest

from shardcore.testing import run_ranks
from tests.checks.tree import ROOT

PROGRAMS = {path.stem: path for path in (ROOT / "examples" / "gallery").glob("*.py")}
# The share of the weights' bytes that each of two ranks stores, if the layout shards any.
SHARES = {
    "diffusion": (0.49, 0.52),  # all kernels
    "language_model": (0.5, 0.65),  # attention and hidden layers
    "recommender": (0.5, 0.65),  # both tables
    "segmentation": (0.49, 0.6),  # kernels of 8 KiB and more
    "text_classifier": (0.5, 0.6),  # the block, and the table of words
    "translation": (0.5, 0.65),  # both blocks
}


@attrs.frozen
class Trained:
    """The history of a rank's training, and the share of the weights that it stores."""

    history: dict[str, list[float]]
    share: float


def train(rank, path):
    """Runs the program as `python PATH --small` does."""
    sys.argv = [str(path), "--small"]
    program = runpy.run_path(str(path), run_name="__main__")
    values = [variable.value.detach() for variable in program["model"].weights]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in values]
    size = sum(value.numel() for value in values)
    return Trained(program["history"], sum(value.numel() for value in local) / size)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_learns_the_same_on_one_device_and_on_two_ranks(name):
    (alone,) = run_ranks(train, 1, PROGRAMS[name], init=False)
    on_ranks = run_ranks(train, 2, PROGRAMS[name], init=False)
    assert alone.share == 1
    for rank in on_ranks:
        assert rank.history.keys() == alone.history.keys()
        for metric, values in alone.history.items():
            assert len(values) == 2
            np.testing.assert_allclose(rank.history[metric], values, rtol=1e-4, err_msg=metric)
        least, most = SHARES.get(name, (1, 1))
        assert least <= rank.share <= most


def test_the_gallery_has_eight_programs_that_are_read_at_a_glance():
    lines = {name: len(path.read_text().splitlines()) for name, path in PROGRAMS.items()}
    assert len(lines) == 8
    assert {name: count for name, count in lines.items() if count >= 80} == {}


def test_the_page_shows_lines_of_the_programs_and_small_pictures():
    page = (ROOT / "docs" / "gallery.md").read_text()
    blocks = re.findall(r'^```py title="examples/gallery/(\w+)\.py"\n(.*?)^```$', page, re.M | re.S)
    assert sorted(name for name, _ in blocks) == sorted(PROGRAMS)
    for name, block in blocks:
        assert set(block.splitlines()) <= set(PROGRAMS[name].read_text().splitlines()), name
        picture = ROOT / "docs" / "images" / "gallery" / f"{name}.svg"
        assert f"(images/gallery/{name}.svg)" in page
        assert picture.stat().st_size < 30 * 1024, name
        ElementTree.parse(picture)
