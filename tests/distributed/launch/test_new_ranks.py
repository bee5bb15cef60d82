"""Ranks that are new interpreters: what they are sent, what they print, and their end."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_SECONDS = 240  # of a script, the one with fifty launches too
# Neither torch nor Keras: a program starts in a fifth of a second.
AGAIN = """
import os, signal, time, shardcore
from shardcore.domain.errors import RankFailed

print("the program starts")
signal.signal(signal.SIGINT, signal.default_int_handler)
base = 10

def add(rank_of):
    print("in a rank")
    return base + int(os.environ[rank_of])

def fails():
    return add("RANK") // (int(os.environ["RANK"]) - 1)

def never_ends():
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        time.sleep(1)

for _ in range(3):
    print(shardcore.launch(add, 2, "LOCAL_RANK", start="spawn"))
    try:
        shardcore.launch(fails, 2, start="spawn")
    except RankFailed as failed:
        print(failed)
    try:
        shardcore.launch(never_ends, 2, start="spawn")
    except KeyboardInterrupt:
        print("interrupted")
"""


def started(program, folder):
    """Starts a script, which is killed if it takes some minutes."""
    script = folder / "script.py"
    script.write_text(program)
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    late = threading.Timer(_SECONDS, process.kill)
    late.daemon = True
    late.start()
    return process


def launch_again(folder, times):
    """Launches ranks that end, that fail and that are interrupted; none may be left.

    The script has no main guard: no rank runs it again.
    """
    program, ranks, lines = started(AGAIN.replace("range(3)", f"range({times})"), folder), [], []
    for _ in range(times):
        while len(ranks) % 2 or not lines or not lines[-1].isdigit():
            lines.append(_line(program))
            ranks += [int(lines[-1])] if lines[-1].isdigit() else []
        os.killpg(program.pid, signal.SIGINT)  # as Jupyter does
        while lines[-1] != "interrupted":
            lines.append(_line(program))
        assert _end_soon(ranks)
    out, err = program.communicate(timeout=30)
    assert (out, err) == (b"", b"")
    assert lines.count("the program starts") == 1
    assert lines.count("[10, 11]") == times
    report = "\n".join(lines)
    assert report.count("rank 1 failed:\nTraceback") == times
    assert report.count("ZeroDivisionError") == times
    assert report.count('script.py", line 14, in fails') == times
    assert report.count('    return add("RANK") // (int(os.environ["RANK"]) - 1)') == times
    assert "shardcore/" not in report


def test_ranks_start_again_after_an_error_and_after_an_interrupt(tmp_path):
    launch_again(tmp_path, 3)


def test_no_rank_and_no_file_outlives_a_killed_program(tmp_path):
    program = started(
        """
import os, shardcore, sys, time
def never_ends():
    child = os.fork()
    print(os.getpid() if child else f"{os.getpid()} {sys.argv[0]}", flush=True)
    while True:
        time.sleep(1)
shardcore.launch(never_ends, 1, start="spawn")
""",
        tmp_path,
    )
    ranks = [int(_line(program).split()[0]) for _ in range(2)]
    folders = [Path(p) for p in Path(f"/proc/{min(ranks)}/cmdline").read_text().split("\0")]
    (folder,) = [path for path in folders if path.name.startswith("shardcore-ranks-")]
    assert folder.exists()
    program.kill()
    program.communicate(timeout=30)
    assert _end_soon(ranks)
    assert not folder.exists()


def test_what_a_rank_prints_is_shown_as_it_prints_it(tmp_path):
    program = started(
        """
import os, shardcore, sys, time
def prints():
    print("1 of 2", end="\\r")
    print("wait", file=sys.stderr)
    while not os.path.exists("go on"):
        time.sleep(0.01)
    os.write(1, "größer \\xff".encode("latin-1")[-1:] + "größer".encode())
shardcore.launch(prints, 1, start="spawn")
print(" at the end")
""",
        tmp_path,
    )
    assert program.stdout.read(7) == b"1 of 2\r"
    assert program.stderr.readline() == b"wait\n"
    (tmp_path / "go on").touch()
    out, err = program.communicate(timeout=30)
    assert (out.decode(), err) == ("\ufffdgrößer at the end\n", b"")


LARGE = """
import os, numpy as np, shardcore
x = np.arange(10_000_000, dtype="float64")
others = {"columns": x.reshape(-1, 2)[:, 0], "small": x[:8]}

def look():
    x[0] = os.getpid()  # of this rank alone
    maps = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("/arrays")]
    folder = os.path.dirname(maps[0][-1])
    sizes = {name: os.path.getsize(f"{folder}/{name}") for name in ("arrays", "body.pickle")}
    values = float(x[1:].sum()), float(others["columns"].sum()), others["small"].tolist()
    return {line[4] for line in maps}, sizes, values, x[0] == os.getpid()

one, two = shardcore.launch(look, 2, start="spawn")
assert one == two, (one, two)
assert len(one[0]) == 1, "both map the same file"
assert one[1]["arrays"] in range(2**20 * 64, 125_000_000), one
assert one[1]["body.pickle"] < 41_000_000 + 2**16, one
assert one[2] == (float(x.sum()), float(x[::2].sum()), x[:8].tolist())
assert one[3] and x[0] == 0
print("sizes", one[1])
"""


def test_a_large_array_travels_once(tmp_path):
    program = started(LARGE, tmp_path)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, b"")
    # 80 MB of x; the columns are 40 MB, below the least size of a large array.
    assert out.startswith(b"sizes {'arrays': 80003072")


def _line(program):
    line = program.stdout.readline()
    assert line, program.communicate(timeout=30)
    return line.decode().rstrip("\n")


def _end_soon(processes):
    deadline = time.monotonic() + 10
    while any(map(_is_alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
