"""An explanation as a table, as data, as a picture."""

import json
import re
import xml.etree.ElementTree as ElementTree

import attrs
import pytest

from shardcore.domain.cost.collectives import (
    Avoidable,
    Collective,
    ExplainedLayer,
)
from shardcore.domain.errors import ArgumentProblem
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable
from shardcore.reporting.inspection.explanation import Explanation
from shardcore.reporting.inspection.picture import block, svg

GATHER = Collective(
    "all_gather", "forward", "net/down", "aten.mm.default", ("model",), 2, 512, 512, (), (8, 32),
    "S(1) -> R", "an operand: <sharded> by dim 1", times=1,
)  # fmt: skip
GRADIENT = Collective(
    "all_reduce", "backward", "net/down", "", ("data", "model"), 4, 1024, 1536,
    ("net/down/kernel", "net/down/bias"), None, "", "the gradients of net/down/kernel", times=3,
)  # fmt: skip
LOSS = attrs.evolve(GRADIENT, phase="loss and metrics", layer="", variables=(), axes=("data",))
LAYERS = (
    ExplainedLayer("net", "Sequential", 0, 1, (), (8, 32), ("data", None)),
    ExplainedLayer(
        "net/down", "Dense<&>", 1, 2,
        (ShardedVariable("net/down/kernel", (32, 32), spec=("data", "model")),
         ShardedVariable("net/down/scale", (), spec=())),
        (8, 32), (("data", "model"), None),
    ),
)  # fmt: skip
ADVICE = Avoidable(
    GATHER, "the kernel is sharded", {"net/down/kernel": ("model", None)}, "it is not"
)


def explanation(**changes):
    return Explanation(**{
        "model": "net", "step": "train", "mesh": Mesh((2, 2), ("data", "model")),
        "strategy": "dtensor", "rank": 3, "layers": LAYERS,
        "collectives": (GATHER, LOSS, GRADIENT), "avoidable": (ADVICE,), **changes,
    })  # fmt: skip


def test_the_table_has_a_row_for_each_and_the_sums():
    shown = [line.split() for line in explanation().text(200).splitlines()]
    rows = [" ".join(words).replace("│", "|") for words in shown]
    assert any("| net/down | all_gather | model | aten.mm.default | 1 | 512 B |" in r for r in rows)
    assert any(
        "| net/down | all_reduce | data, model | - | 3 | 3.0 KiB | 4.5 KiB |" in r for r in rows
    )
    assert any("| in all | | all_reduce | data | | 3 | 3.0 KiB | 4.5 KiB |" in row for row in rows)
    assert any("| in all | | | | | 7 | 6.5 KiB | 9.5 KiB |" in row for row in rows)
    text = " ".join(word for words in shown for word in words)
    assert "7 collectives (1 all_gather, 6 all_reduce) on 6.5 KiB of this rank." in text
    assert (
        "Avoidable: the kernel is sharded. "
        "Instead: layout_map['net/down/kernel'] = ('model', None). Then it is not." in text
    )


def test_on_80_columns_the_phase_is_a_line_and_the_reason_is_below_the_layer():
    shown = explanation().text(80)
    assert max(map(len, shown.splitlines())) <= 80
    rows = [" ".join(line.replace("│", "|").split()) for line in shown.splitlines()]
    first = rows.index("| FORWARD | | | | |")
    assert rows[first + 1] == "| net/down | all_gather | model | 1 | 512 B |"
    assert rows[first + 2].startswith("| an operand: <sharded> by | |")
    assert rows.index("| BACKWARD | | | | |") > first
    assert "| | | | 7 | 9.5 KiB |" in rows
    assert "aten.mm.default" not in shown


def test_it_is_data():
    data = json.loads(json.dumps(explanation().to_dict()))
    assert data["calls"] == {"all_gather": 1, "all_reduce": 6}
    assert data["operand_bytes"] == {"all_gather": 512, "all_reduce": 6 * 1024}
    assert data["collectives"][0]["layer"] == "net/down"
    assert data["avoidable"][0]["rules"] == {"net/down/kernel": ["model", None]}
    assert data["mesh"] == "(data=2, model=2)"


def test_without_collectives_it_says_why():
    nothing = {"collectives": (), "avoidable": ()}
    assert "ranks: no distribution is set." in explanation(mesh=None, **nothing).text(200)
    one = Mesh((1, 1), ("data", "model"))
    assert "ranks: the mesh is of one device." in explanation(mesh=one, rank=0, **nothing).text(200)
    assert "Nothing is moved between ranks." in explanation(**nothing).text(200)


def texts_of(path):
    """The texts of a picture, in order."""
    root = ElementTree.fromstring(path.read_text())
    return ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_shows_layers_layouts_and_collectives(tmp_path):
    texts = texts_of(explanation().save(tmp_path / "step.svg"))
    for expected in (
        "net", "Sequential", "down", "Dense<&> x2", "kernel", "32x32, 4.0 KiB", "scalar, 4 B",
        "output", "8x32, 1.0 KiB", "loss and metrics", "replicated",
        "sharded over 'model' (2 ranks)", "coloured: the shard of rank 3; areas: bytes of full",
        "all_gathersends 512 B over model, forward",
        "all_reducesends 4.5 KiB over data, model, 3 times, backward",
    ):  # fmt: skip
        assert any(text.startswith(expected) for text in texts), expected


def test_reasons_and_remedies_are_text_that_no_pointer_must_find(tmp_path):
    words = " ".join(["the gradients of a kernel", *["that has a long name"] * 9])
    path = explanation(collectives=(GATHER, attrs.evolve(GRADIENT, reason=words)))
    texts = texts_of(path.save(tmp_path / "step.svg"))
    assert words in " ".join(texts)
    assert GATHER.reason in texts
    assert texts.count("Avoidable: layout_map['net/down/kernel'] = ('model', None)") == 1


KERNEL = ShardedVariable("net/a/kernel", (64, 256), spec=(None, "model"))


def blocks(*variables, shape=None, itemsize=4):
    """Width and height of each block of a picture of one layer, at the left side of the column."""
    layer = ExplainedLayer("net/a", "Dense", 0, 1, variables, shape, None, itemsize)
    picture = svg(explanation(layers=(layer,), collectives=(), avoidable=()), "", "")
    found = re.findall(
        r'<rect x="200" y="[\d.]+" width="([\d.]+)" height="([\d.]+)" '
        r'class="part (?:others|replicated)"/>',
        picture,
    )
    return [(float(width), float(height)) for width, height in found]


def test_areas_are_in_proportion_to_bytes():
    quarter = attrs.evolve(KERNEL, shape=(32, 128))
    half = attrs.evolve(KERNEL, itemsize=2)
    sides = blocks(KERNEL, quarter, half, shape=(128, 128))
    areas = [width * height for width, height in sides]
    assert areas == pytest.approx([2600, 650, 1300, 2600], rel=1e-3)
    assert [width / height for width, height in sides] == pytest.approx([4, 4, 4, 1], rel=1e-3)


def test_the_output_counts_the_bytes_of_its_dtype():
    assert blocks(KERNEL, shape=(64, 256), itemsize=1)[1] == pytest.approx((50.99, 12.7475), 1e-3)


def test_a_bias_is_a_thin_bar():
    bias = attrs.evolve(KERNEL, shape=(1024,), spec=(None,))
    tiny = attrs.evolve(KERNEL, shape=(8,), spec=(None,))
    scalar = attrs.evolve(KERNEL, shape=(), spec=())
    _, *bars = blocks(KERNEL, bias, tiny, scalar)
    assert bars == [(2600 * 1024 / (64 * 256) / 4, 4), (24, 4), (24, 4)]


def test_a_block_keeps_a_least_size_and_a_moderate_form():
    tiny = attrs.evolve(KERNEL, shape=(2, 2))
    wide = attrs.evolve(KERNEL, shape=(2, 8192))
    assert blocks(KERNEL, tiny, wide)[1:] == [(10, 10), blocks(KERNEL)[0]]


def test_a_vector_of_a_large_model_is_higher_not_wider():
    ((width, height),) = blocks(attrs.evolve(KERNEL, shape=(50_000,), spec=(None,)))
    assert (width, height) == pytest.approx((101.98, 25.495), rel=1e-3)


def test_parts_too_narrow_for_a_line_have_none():
    mesh = Mesh((8,), ("model",))
    assert block(0, 0, (24.0, 4.0), ("model",), mesh, 0).count('class="cut"') == 7
    assert block(0, 0, (23.0, 4.0), ("model",), mesh, 0).count('class="cut"') == 0


def test_the_part_of_a_rank_is_where_its_coordinate_says():
    """Rank 3 is at (1, 1): the kernel's lower right quarter, the output's last rows."""
    mesh = Mesh((2, 2), ("data", "model"))
    kernel = block(10, 20, (34, 20), ("data", "model"), mesh, 3)
    assert '<rect x="27" y="30" width="17" height="10" class="part axis1"/>' in kernel
    assert '<polygon points="27,30 44,30 27,40" class="axis0"/>' in kernel
    output = block(10, 20, (34, 20), (("data", "model"), None), mesh, 3)
    assert '<rect x="10" y="35" width="34" height="5" class="part axis0"/>' in output


def test_the_bar_of_a_collective_is_as_long_as_its_bytes(tmp_path):
    """The largest takes the column of 460 px, which its two axes share."""
    picture = explanation().save(tmp_path / "step.svg").read_text()
    bars = re.findall(
        r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="5" class="(\w+)"', picture
    )
    gather, *gradients, loss = bars
    assert gradients == [("480", "230", "axis0"), ("710", "230", "axis1")]
    assert (gather[0], gather[2]) == ("480", "axis1")
    assert float(gather[1]) == pytest.approx(460 * 512 / (3 * 1536), rel=1e-3)
    assert loss == ("480", "460", "axis0")


@pytest.mark.parametrize("phase", ["batch", "forward", "backward", "update"])
def test_a_collective_names_its_phase(phase, tmp_path):
    one = attrs.evolve(GATHER, phase=phase, reason="why")
    for each in (one, attrs.evolve(one, layer="")):
        texts = texts_of(explanation(collectives=(each,)).save(tmp_path / "step.svg"))
        assert f"all_gathersends 512 B over model, {phase}" in texts
        assert "why" in texts


def test_a_long_legend_is_wrapped(tmp_path):
    axes = tuple(f"axis_with_a_name_{n}" for n in range(4))
    mesh = Mesh((2, 2, 2, 2), axes)
    path = explanation(mesh=mesh, layers=(), collectives=()).save(tmp_path / "step.svg")
    labels = re.findall(r'<text x="(\d+)" y="(\d+)" class="soft">sharded over', path.read_text())
    assert len(labels) == 4
    assert len({y for _, y in labels}) == 2


def test_a_page_has_picture_and_table(tmp_path):
    page = explanation().save(tmp_path / "step.html").read_text()
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert root.find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert "in all" in "".join(root.find(".//pre").itertext())


@pytest.mark.parametrize("changes", [{"mesh": None}, {"layers": (), "collectives": ()}])
def test_a_picture_of_less(changes, tmp_path):
    ElementTree.fromstring(explanation(**changes).save(tmp_path / "step.svg").read_text())


def test_other_files_are_refused():
    with pytest.raises(ArgumentProblem, match=r"\".svg\" or .* got 'step.png'"):
        explanation().save("step.png")
