"""The status as a table of two columns."""

import attrs

from shardcore.reporting.status import Status

NOTHING = Status(False, None, {}, None, None, (), 0, 1, {"python": "3.11.9", "torch": None})
IN_USE = attrs.evolve(
    NOTHING,
    installed=True,
    strategy="dtensor",
    passed_over={"single": "it is for one device, " + "and the job has more " * 5},
    mesh_shape=(2, 4),
    axis_names=("data", "model"),
    devices=tuple(f"cpu:{rank}" for rank in range(8)),
    rank=3,
    world_size=8,
)


def rows(status):
    """The cells of each line, at 80 columns."""
    lines = status.text(80).splitlines()
    assert max(map(len, lines)) <= 80
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def test_without_an_installation_it_says_what_to_call():
    assert ["strategy", "none: call shardcore.install()"] in rows(NOTHING)
    assert ["mesh", "none: no distribution is set"] in rows(NOTHING)
    assert ["torch", "not installed"] in rows(NOTHING)


def test_an_installation_with_mesh_devices_and_reasons():
    found = rows(IN_USE)
    for expected in (
        ["strategy", "dtensor"],
        ["mesh", "data=2, model=4"],
        ["devices", "cpu:0, cpu:1, cpu:2, cpu:3, cpu:4, cpu:5, cpu:6, cpu:7"],
        ["rank", "3 of 8"],
        ["python", "3.11.9"],
    ):
        assert expected in found
    first = next(number for number, row in enumerate(found) if row[0] == "not single")
    assert found[first][1].startswith("it is for one device, and the job has more")
    assert found[first + 1][0] == ""  # the reason wraps


def test_ranks_are_shown_by_host():
    found = rows(attrs.evolve(IN_USE, hosts=tuple("aaabbbba")))
    assert ["host a", "ranks 0 to 2, 7"] in found
    assert ["host b", "ranks 3 to 6"] in found
    assert ["host a", "rank 0"] in rows(attrs.evolve(NOTHING, hosts=("a",)))
