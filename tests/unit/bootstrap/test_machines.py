"""Descriptions of machines in files."""

import attrs
import pytest

from shardcore.bootstrap.cost import machines
from shardcore.domain.cost.machine import known_machines
from shardcore.domain.errors import MachineError

TOML = """
name = "mine"
devices = 2
memory = 1000
[speeds.float32]
flops = 1e12
bandwidth = 1e10
"""


def test_a_machine_is_written_and_read(tmp_path):
    mine = attrs.evolve(known_machines()["h100"], name="mine")
    machines.write(mine, tmp_path / "mine.json")
    assert machines.find(str(tmp_path / "mine.json")) == mine


def test_a_machine_may_be_toml(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    found = machines.find(str(tmp_path / "mine.toml"))
    assert (found.devices, found.speeds["float32"].flops) == (2, 1e12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"No machine '.*': there are t4, v100, .*, h100, h200, and no such file"),
        ("{", r"is no file of a machine: Expecting property name"),
        ("[]", r"mine.json': A machine is given by its fields, got \[\]"),
    ],
)
def test_a_file_that_describes_no_machine_is_an_error(tmp_path, text, message):
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MachineError, match=message):
        machines.find(str(file))


@pytest.mark.parametrize("size", ["80", "GB", "-1GB", "0GB", "80 PB", -1, 1.5, True, None])
def test_what_is_no_size_is_an_error(size):
    with pytest.raises(MachineError, match="is no size: give bytes, or text such as '80GB'"):
        machines.bytes_of(size)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(MachineError, match="cannot be written to"):
        machines.write(known_machines()["h100"], tmp_path / "no folder" / "mine.json")
