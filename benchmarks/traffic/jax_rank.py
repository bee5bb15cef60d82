"""Trains cases on JAX over two CPU devices, and reports what XLA made them send.

Run by the interpreter that has JAX, which sees the devices and the dump folder in XLA_FLAGS. It
reads one request, and answers with a line of JSON for each case.
"""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import keras

from benchmarks.traffic import models
from benchmarks.traffic.hlo import module_traffic
from benchmarks.traffic.sent_bytes import as_json
from benchmarks.traffic.stored import one_line

STEPS = 2  # the second finds its state as the first has left it: another compilation would be seen


def main() -> None:
    """Answer the request for a mesh and some cases."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    request = json.loads(sys.stdin.readline())
    folder, mesh = Path(request["folder"]), models.MESHES[request["mesh"]]
    with models.stand_ins("torch", "shardcore"):
        cases = models.layer_cases()
    for name in request["cases"]:
        print(json.dumps(_answer(cases[name], mesh, folder)), file=answers, flush=True)


def _answer(case: Any, mesh: models.Mesh, folder: Path) -> dict[str, Any]:
    _empty(folder)
    try:
        # JAX has float64 only where it is asked for.
        jax.config.update("jax_enable_x64", "float64" in case.name)
        model = models.build(case, mesh)
        for _, batch in zip(range(STEPS), models.batches(case), strict=False):
            model.train_on_batch(*batch)
        return as_json(module_traffic(_last_module(folder), models.RANKS))
    except Exception as error:  # noqa: BLE001 - whatever Keras on JAX raises is a refusal
        traceback.print_exc()
        return {"failure": one_line(f"{type(error).__name__}: {error}")}
    finally:
        keras.distribution.set_distribution(None)


def _last_module(folder: Path) -> str:
    """Read the training step that was compiled last."""
    modules = sorted(folder.glob("*train_step*after_optimizations.txt"))
    if not modules:
        raise RuntimeError("Keras on JAX does not compile this step")
    return modules[-1].read_text()


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


if __name__ == "__main__":
    main()
