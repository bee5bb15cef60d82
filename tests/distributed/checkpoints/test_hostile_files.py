"""Files of a checkpoint that were made to do harm: a part of `tests.faults.files.hostile_files`."""

import json
import os
import shutil

import pytest

import shardcore
from shardcore import cli
from shardcore.domain.errors import CheckpointError
from shardcore.testing import run_ranks
from tests.distributed.checkpoints.checkpointed import COLUMNS, build, distribute
from tests.faults.files import forgeries, hostile_files


def test_forged_files_are_read_or_an_error_within_seconds():
    found = run_ranks(lambda rank: hostile_files.run(cases=150, seed=3, large=75), 1)[0]
    assert [each for each in found if each[1] not in ("error", "read")] == []
    assert {what for _, what in found} == {"error", "read"}


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors"])
def test_a_pipe_is_an_error_of_a_load_and_of_the_commands(name, tmp_path, capsys):
    def save(rank):
        distribute((1, 2), rules=COLUMNS)
        shardcore.save_checkpoint(tmp_path / "saved", build(), step=1)

    def load(rank):
        distribute((1, 2), rules=COLUMNS)
        with pytest.raises(CheckpointError, match="Expected a regular file") as error:
            shardcore.load_checkpoint(folder, build())
        return str(error.value)

    run_ranks(save, 2)
    folder = shutil.copytree(tmp_path / "saved" / "step-00000001", tmp_path / "step-00000001")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert all(name in message for message in run_ranks(load, 2, timeout=60))
    for words in (["inspect", folder], ["verify", folder], ["convert", folder, tmp_path / "to"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoint", *map(str, words)])
        assert ended.value.code == 1
        assert "Expected a regular file" in capsys.readouterr().err


def test_a_file_of_keras_that_links_to_itself_or_is_a_pipe_is_an_error(tmp_path, capsys):
    import h5py

    with h5py.File(tmp_path / "loop.weights.h5", "w") as file:
        file.create_group("layers")["again"] = file["/"]
    with h5py.File(tmp_path / "many.weights.h5", "w") as file:
        group = file
        for _ in range(60):  # a million million paths, and no variable
            inner = group.create_group("a")
            group["b"] = inner
            group = inner
    os.mkfifo(tmp_path / "pipe_00000.weights.h5")
    text = '{"weight_map": {"/layers": "pipe_00000.weights.h5"}}'
    (tmp_path / "pipe.weights.json").write_text(text)
    for name, message in (
        ("loop.weights.h5", "linked twice"),
        ("many.weights.h5", "linked twice"),
        ("pipe.weights.json", "Expected a regular file"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["checkpoint", "convert", str(tmp_path / name), str(tmp_path / "to")])
        assert ended.value.code == 1
        assert message in capsys.readouterr().err


ESCAPE = "\x1b[31m\x1b]0;owned\x07\u202e"


def test_no_escape_sequence_of_a_file_or_a_folder_reaches_the_terminal_or_the_log(
    tmp_path, capsys, caplog
):
    import h5py

    folder = tmp_path / f"job{ESCAPE}" / hostile_files.STEP
    folder.parent.mkdir()
    forgeries.make(folder)
    found = json.loads((folder / "index.json").read_text())
    variable = found["content"]["variables"][0]
    variable |= {"path": ESCAPE, "layout": ESCAPE, "group": ESCAPE}
    found["content"] |= {"mesh": ESCAPE, "versions": {ESCAPE: ESCAPE}}
    forgeries.sign(folder, found)
    assert cli.main(["checkpoint", "inspect", str(folder)]) == 0
    assert cli.main(["checkpoint", "inspect", "--json", str(folder)]) == 0
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    target = tmp_path / "to.safetensors"
    assert cli.main(["checkpoint", "convert", str(folder), str(target)]) == 0

    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file.create_dataset(f"vars/{ESCAPE}", data=[1.0]).attrs["dtype"] = ESCAPE
    (folder.parent / "step-00000002").mkdir()
    (folder.parent / f".unfinished-{ESCAPE}step-00000003").mkdir()
    (folder.parent / "step-00000002" / "index.json").write_text(ESCAPE)
    assert cli.main(["checkpoint", "inspect", str(folder.parent)]) == 0
    for source in (tmp_path / "a.weights.h5", folder.parent / "step-00000002", tmp_path / ESCAPE):
        with pytest.raises(SystemExit):
            cli.main(["checkpoint", "convert", str(source), str(tmp_path / "to")])
    assert "was not completed" in caplog.text
    assert "is skipped" in caplog.text
    printed = capsys.readouterr()
    for shown in (printed.out, printed.err, caplog.text):
        assert shown
        assert all(char.isprintable() or char in "\n\t" for char in shown)
    assert "\ufffd" in printed.out
    assert "\ufffd" in caplog.text
