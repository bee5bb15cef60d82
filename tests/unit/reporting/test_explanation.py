"""An explanation as a table, as data, as a picture."""

import json
import re
import xml.etree.ElementTree as ElementTree

import attrs
import pytest

from shardcore.domain.errors import StrategyError
from shardcore.domain.explanation.collectives import (
    Avoidable,
    Collective,
    ExplainedLayer,
    ExplainedVariable,
)
from shardcore.domain.mesh import Mesh
from shardcore.reporting.explanation import Explanation

GATHER = Collective(
    "all_gather", "forward", "net/down", "aten.mm.default", ("model",), 2, 512, 512, (), (8, 32),
    "S(1) -> R", "an operand: <split> by dim 1", times=1,
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
        (ExplainedVariable("net/down/kernel", (32, 32), spec=("data", "model")),
         ExplainedVariable("net/down/scale", (), spec=())),
        (8, 32), (("data", "model"), None),
    ),
)  # fmt: skip
ADVICE = Avoidable(GATHER, "the kernel is split", {"net/down/kernel": ("model", None)}, "it is not")


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
        "Avoidable: the kernel is split. Instead: layout_map['net/down/kernel'] = ('model', None). "
        "Then it is not." in text
    )


def test_on_80_columns_the_phase_is_a_line_and_the_reason_is_below_the_layer():
    shown = explanation().text(80)
    assert max(map(len, shown.splitlines())) <= 80
    rows = [" ".join(line.replace("│", "|").split()) for line in shown.splitlines()]
    first = rows.index("| FORWARD | | | | |")
    assert rows[first + 1] == "| net/down | all_gather | model | 1 | 512 B |"
    assert rows[first + 2].startswith("| an operand: <split> by dim")
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


def test_the_picture_shows_layers_layouts_and_collectives(tmp_path):
    path = explanation().save(tmp_path / "step.svg")
    root = ElementTree.fromstring(path.read_text())
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("netSequential") for text in texts)
    assert any(text.startswith("downDense<&> x2") for text in texts)
    assert any(text == "kernel 32x32" for text in texts)
    assert any(text.startswith("all_gather 512 Bmm") for text in texts)
    assert any(text.startswith("all_reduce 1.0 KiB x3kernel +1") for text in texts)
    assert "loss and metrics" in texts
    assert any(text.startswith("Avoidable: the kernel is split.") for text in texts)
    titles = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert {GATHER.reason, GRADIENT.reason} <= set(titles)
    forced = [each for each in root.iter() if each.get("class") == "chip forced"]
    assert len(forced) == 1


def test_the_part_of_a_rank_is_where_its_coordinate_says(tmp_path):
    """Rank 3 is at (1, 1): the kernel's lower right quarter, the output's last rows."""
    picture = explanation().save(tmp_path / "step.svg").read_text()
    (whole,) = re.findall(
        r'<rect x="300" y="(\d+)" width="34" height="20" class="part others"/>', picture
    )
    top = int(whole) + 10
    assert f'<rect x="317" y="{top}" width="17" height="10" class="part axis1"/>' in picture
    assert f'<polygon points="317,{top} 334,{top} 317,{top + 10}" class="axis0"/>' in picture
    assert (
        f'<rect x="560" y="{int(whole) + 15}" width="34" height="5" class="part axis0"/>' in picture
    )


@pytest.mark.parametrize(
    ("phase", "x"), [("forward", 790), ("batch", 790), ("backward", 1060), ("update", 1060)]
)
def test_the_passes_have_a_column_each(phase, x, tmp_path):
    one = attrs.evolve(GATHER, phase=phase, reason="why")
    for each in (one, attrs.evolve(one, layer="")):
        path = explanation(collectives=(each,)).save(tmp_path / "step.svg")
        assert f'<title>why</title><rect x="{x}"' in path.read_text()


def test_a_page_has_picture_and_table(tmp_path):
    page = explanation().save(tmp_path / "step.html").read_text()
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    assert root.find(".//{http://www.w3.org/2000/svg}svg") is not None
    assert "in all" in "".join(root.find(".//pre").itertext())


@pytest.mark.parametrize("changes", [{"mesh": None}, {"layers": (), "collectives": ()}])
def test_a_picture_of_less(changes, tmp_path):
    ElementTree.fromstring(explanation(**changes).save(tmp_path / "step.svg").read_text())


def test_other_files_are_refused():
    with pytest.raises(StrategyError, match=r"saved as \"step.svg\" or .* got 'step.png'"):
        explanation().save("step.png")
