"""Runs the programs of the gallery, whole, on one device and on two ranks, and draws what they did.

python examples/pictures.py               all of them: ten minutes
python examples/pictures.py gan images    these two

It writes docs/images/gallery/*.svg, and the table of docs/gallery.md.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure
from charts import picture

import shardcore

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "examples" / "gallery"
PICTURES, PAGE = ROOT / "docs" / "images" / "gallery", ROOT / "docs" / "gallery.md"
COMMANDS = {
    1: [sys.executable],
    2: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
}
TIMES = "| `{}` | {:.0f} s | {:.0f} s | {:.0f} s | {:.0f} s |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", help="their names; by default all")
    parser.add_argument(
        "--report", metavar="FOLDER", help="run one on this rank; write facts there"
    )
    parser.add_argument("--small", action="store_true", help="the size of the tests, in seconds")
    options = parser.parse_args()
    size = ["--small"] if options.small else []
    if options.report:
        report(options.programs[0], size, Path(options.report))
        return
    for name in options.programs or sorted(path.stem for path in PROGRAMS.glob("*.py")):
        draw(name, size)


def report(name, size, folder):
    """Runs the program on this rank, and writes what `draw` needs. All ranks call it together."""
    sys.argv = [name, *size]
    began = time.monotonic(), time.process_time()
    program = runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
    seconds = time.monotonic() - began[0], time.process_time() - began[1]
    model, rank = program["model"], int(os.environ.get("RANK", "0"))
    facts = {
        "history": program["history"],
        "seconds": seconds,
        "weights": measure.stored(model.weights)["here"],
        "states": measure.stored(states(model))["here"],
    }
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    if "RANK" in os.environ:
        step = shardcore.explain(model, batch(program))
        if rank == 0:
            step.save(str(folder / "step.svg"))


def states(model):
    """Lists the variables of all optimizers of the model."""
    import keras

    mine = [value for value in vars(model).values() if isinstance(value, keras.Optimizer)]
    return [variable for optimizer in mine for variable in optimizer.variables]


def batch(program):
    """The first batch of the program, `(x, y)`; of one without targets `(x, None)`."""
    import keras

    rows, data = program["batch_size"], (program["x"], program.get("y"))
    return keras.tree.map_structure(lambda array: None if array is None else array[:rows], data)


def draw(name, size):
    """Runs the program on one device and on two ranks, and writes its picture and its times."""
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, command in COMMANDS.items():
            print(f"{name} on {ranks} rank(s)", flush=True)
            words = [*command, __file__, name, *size, "--report", folder]
            subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
            runs[ranks] = json.loads(Path(folder, "facts-0.json").read_text())
        step = Path(folder, "step.svg").read_text()
    one, two = runs.values()
    names = ["loss"] if "loss" in one["history"] else list(one["history"])
    losses = {name: (one["history"][name], two["history"][name]) for name in names}
    stored = {
        "one device": (one["weights"], one["states"]),
        "each of two ranks": (two["weights"], two["states"]),
    }
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{name}.svg").write_text(picture(f"{name}.py", losses, stored, step))
    row = TIMES.format(name, *(time for run in runs.values() for time in run["seconds"]))
    text = re.sub(rf"^\| `{name}` \|.*\d s \|$", row, PAGE.read_text(), flags=re.MULTILINE)
    PAGE.write_text(text)
    print(row)


if __name__ == "__main__":
    main()
