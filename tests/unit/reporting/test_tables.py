"""Tables that fit the terminal."""

import pytest

from shardcore.reporting.tables import Column, Report, build, human_bytes, shortened

COLUMNS = (
    Column("path"),
    Column("spec"),
    Column("shape", "drop"),
    Column("bytes", right=True),
    Column("reason", "below"),
)
ROWS = [
    ("net/block_11/attention/query/kernel", "(None, 'model')", "(64, 64)", "4.0 KiB", "w " * 40),
    (),
    ("in all", "", "", "4.0 KiB", ""),
]


class Result(Report):
    """A result of two rows."""

    def table(self, width=None):
        """Returns the table."""
        return build("a title", COLUMNS, ROWS, width)


def test_where_all_columns_fit_each_has_a_column():
    text = Result().text(200)
    assert "│ (64, 64) │" in text
    assert "w w w" in text.splitlines()[4]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_table_drops_columns_and_writes_the_reason_below(width):
    lines = Result().text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert "(64, 64)" not in "".join(lines)
    assert "(None, 'model')" in "".join(lines)
    path, reason = (line.strip("│").split("│")[0] for line in lines[5:7])
    assert path.strip().startswith("net/block_")
    assert reason.startswith("   w w")


def test_an_empty_row_separates_sections():
    assert sum(line.startswith("├") for line in Result().text(80).splitlines()) == 1


def test_the_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "66")
    assert str(Result()) == Result().text(66)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_for_people(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize("room", [3, 10, 15])
def test_a_shortened_path_takes_the_room(room):
    short = shortened("decoder/block_11/attention", room)
    assert len(short) == room
    assert short.count("…") == 1
    assert "decoder/block_11/attention".startswith(short.partition("…")[0])
    assert "decoder/block_11/attention".endswith(short.partition("…")[2])
